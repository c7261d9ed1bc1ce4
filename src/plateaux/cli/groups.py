"""The commands by purpose, in the order of `--help`, and a hint for options that are keys of a recipe."""

from typing import Any

from typer.core import TyperGroup

GROUPS = {
    "Train": ("train", "status", "list", "recipe", "study", "plan", "import-weights"),
    "Evaluate": ("evaluate", "calibrate", "report", "landscape", "select", "soup"),
    "Use": ("predict", "export", "serve", "push", "pull", "verify"),
}
OTHERS = "Installed packages"


class GroupedCommands(TyperGroup):
    """Commands in groups."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in the order of the groups."""
        listed = [name for names in GROUPS.values() for name in names]
        return [*(name for name in listed if name in self.commands), *(set(self.commands) - set(listed))]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        names = self.list_commands(ctx)
        known = {name for group in GROUPS.values() for name in group}
        for title, group in {**GROUPS, OTHERS: [name for name in names if name not in known]}.items():
            rows = [(name, self.commands[name].get_short_help_str(100)) for name in group if name in names]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. An unknown option of one with `--set` may be meant as a key of the recipe."""
        try:
            return super().invoke(ctx)
        except Exception as problem:
            if type(problem).__name__ == "NoSuchOption":  # of the click that typer contains
                _add_hint(problem)
            raise


def _add_hint(problem: Any) -> None:
    if any(param.name == "changes" for param in problem.ctx.command.params):
        problem.message = f"No such option: {problem.option_name}. {_recipe_hint(problem.option_name)}"
        problem.possibilities = []


def _recipe_hint(option: str) -> str:
    """Return how to set the value of a recipe that is called like an option."""
    from plateaux.config.recipe import Recipe

    name = option.lstrip("-").replace("-", "_")
    keys = [
        f"{section}.{name}"
        for section, field in Recipe.model_fields.items()
        if name in getattr(field.annotation, "model_fields", {})
    ]
    example = keys[0] if len(keys) == 1 else "section.key"
    return f"Values of the recipe are changed with --set: --set {example}=VALUE"
