"""Which of several equal engines a request goes to: the one that has its prefix cached, unless that has too much to do."""
