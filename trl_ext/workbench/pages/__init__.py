"""Pages of one run and of several, and the templates that all pages share."""
