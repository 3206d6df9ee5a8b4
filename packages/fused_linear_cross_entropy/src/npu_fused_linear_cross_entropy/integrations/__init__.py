"""The head inside trainers: a module a trainer, which imports that trainer and nothing else of the kind.

Most have `register()`, which puts our operators where the trainer looks for its own, and `unregister()`, which restores
the trainer's. verl calls its `register` by itself: the package is an entry point of its plugins. torchtitan has neither: its
configuration names the module.
"""
