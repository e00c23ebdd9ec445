"""Plan to `Work`, seconds, bytes, `Timeline` and `Forecast`. No torch."""
