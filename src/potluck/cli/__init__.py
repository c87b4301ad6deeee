"""The command line: `app` lists the commands, each file holds one group of them, `views` what they show."""
