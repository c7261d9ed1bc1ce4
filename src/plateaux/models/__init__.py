"""Changes to networks: freezing, pruning, LoRA adapters, and a shared backbone with heads.

Architectures are plug-ins in `models.architectures`. Building a model from a recipe belongs in `config.builders`."""
