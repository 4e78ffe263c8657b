"""Write HTML pages of one run or of several, with templates that all pages share."""
