"""Reports: what runs and studies came to, as one page, as tables, and as figures for papers."""
