"""The chips: their sizes, and which one this process builds for."""
