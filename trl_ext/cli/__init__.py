"""Run the command `trl-ext`: parse its flags, show its help, find the tool or recipe, and start training."""
