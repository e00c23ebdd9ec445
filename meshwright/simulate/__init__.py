"""Plan -> Work -> Timeline -> Forecast. No torch."""
