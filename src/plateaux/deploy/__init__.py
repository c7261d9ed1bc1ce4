"""Bundles: export, verification, batch prediction with runs or bundles, and the Hugging Face Hub."""
