"""What the tilings of both chips share. No kernel is the same on both."""
