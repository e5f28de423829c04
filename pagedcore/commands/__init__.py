"""What stands behind the command line, one noun a file. Nothing here is imported before a command needs it."""
