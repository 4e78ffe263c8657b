"""What `trl-ext` is: its flags and help, which tool is meant, and how training is started."""
