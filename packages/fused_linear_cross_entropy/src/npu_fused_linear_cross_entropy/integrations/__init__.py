"""The head inside trainers: a module a trainer, which imports that trainer and nothing else of the kind.

Each has `register()`, which puts our operators where the trainer looks for its own, and `unregister()`, which restores
the trainer's. verl calls `register` by itself: the package is an entry point of its plugins.
"""
