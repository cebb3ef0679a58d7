"""Studies made with `interp`."""
