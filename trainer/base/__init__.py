"""What every other package of trainer may use: errors, logging, safe text, processes and temporary files."""
