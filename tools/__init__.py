"""What people run in this repository: the demo, continuous integration, releases."""
