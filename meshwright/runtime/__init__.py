"""From a plan and a model to training steps: mesh, build (fold `apply`), loop, record."""
