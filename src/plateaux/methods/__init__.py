"""Plug-ins: one training method per file, found by name. The registry imports every file here.

Update rules and losses that methods share belong in `optim`."""
