"""The operator's interactive menu, a program for the whole terminal."""
