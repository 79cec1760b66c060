"""Logs for TensorBoard."""

from nvalchemi.hooks.reporting.tensorboard import ScalarEvents


class TensorBoardWriter(ScalarEvents):
    """Write the rows of a log as scalars ``<quantity>/system_<system_id>``, flushed after every step."""

    def __call__(self, rows: list[dict[str, int | float | None]]) -> None:
        """Write the rows of one step."""
        scalars = {
            f"{name}/system_{row['system_id']}": value
            for row in rows
            for name, value in row.items()
            if name not in ("step", "system_id", "graph_idx") and value is not None
        }
        if rows:
            self.add(scalars, int(rows[0]["step"] or 0))
