"""``nvalchemi models``: which potentials can be used here."""

import typer


def models() -> None:
    """List the potentials.

    Also what they need that is not installed, and the devices of this machine.
    """
    import torch

    from nvalchemi.cli.tables import Column, print_table
    from nvalchemi.models.catalog import available_models

    rows = [
        (row.name, "yes" if row.usable else "no", row.extra, row.description, row.reason or None)
        for row in available_models()
    ]
    print_table([Column(heading) for heading in ("model", "usable", "extra", "", "to install")], rows)
    typer.echo(f"cpu: {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        typer.echo(f"cuda:{index}: {torch.cuda.get_device_name(index)}")
    if torch.cuda.device_count() == 0:
        typer.echo("cuda: none that torch can use")
