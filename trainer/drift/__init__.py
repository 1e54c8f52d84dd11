"""How far two sets of data are from each other."""
