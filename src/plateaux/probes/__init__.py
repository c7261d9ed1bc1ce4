"""Questions about the landscape around one member, one file a family."""
