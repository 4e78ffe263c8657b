"""Run the command `trl-ext`: find the recipe or tool, parse its flags, show its help, and start training."""
