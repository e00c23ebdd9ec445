"""`mw check`: a plan compared with a plain PyTorch loop on one device, and its traffic with its price."""
