"""D-FINE and RT-DETRv2."""
