"""`streamrl keys`: makes the keys with which sites authenticate each other."""

from __future__ import annotations

from pathlib import Path

import click

from streamrl.errors import UserError


@click.command()
@click.option("--cluster", type=click.Path(path_type=Path), required=True, help="Cluster file.")
@click.option("--site", "sites", multiple=True, metavar="NAME", help="Make only this site's keys; may be repeated.")
@click.option("--replace", is_flag=True, help="Replace existing keys; sites are no longer admitted with the old ones.")
def command(cluster: Path, sites: tuple[str, ...], replace: bool) -> None:
    """Make the key pairs of a cluster's sites, in the folder that the cluster file names (security.keys).

    Each site needs the public keys of all sites and its own secret key, but no other. To avoid sending secrets, make
    each site's keys at that site, with --site, and copy only the public ones. A cluster of one site needs none.

    \b
    Example:
      streamrl keys --cluster cluster_configs/cross_datacenter.yaml
      streamrl keys --cluster cluster_configs/cross_datacenter.yaml --site oslo
    """
    import difflib

    from streamrl.config.load import load_cluster
    from streamrl.transport.curve import make_keys, public_file, secret_file

    config = load_cluster(cluster)
    for site in sites:
        if site not in config.sites:
            near = difflib.get_close_matches(site, config.sites, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"sites: {', '.join(config.sites)}"
            raise UserError(f"{cluster}: no site {site!r}; {hint}")
    if not config.remote_sites:
        click.echo(f"nothing made: {cluster} has one site, which needs no keys")
        return
    folder = Path(config.security.keys)
    made = [site for site in sites or config.sites if make_keys(folder, site, replace)]
    for site in dict.fromkeys(sites or config.sites):
        has = "it has keys" if secret_file(folder, site).exists() else "its public key is here, but not its secret one"
        click.echo(f"{site}: {'made' if site in made else f'kept, {has} (--replace makes new ones)'}")
    click.echo(f"\nFolder: {folder}")
    here = dict.fromkeys(sites or config.sites)
    click.echo(
        f"To every {'other ' if sites else ''}site: {', '.join(public_file(folder, site).name for site in here)}"
    )
    for site in here:
        if secret_file(folder, site).exists():
            click.echo(f"Only to {site}: {secret_file(folder, site).name}")
    for site in config.sites:
        if not (public := public_file(folder, site)).exists():
            click.echo(f"Still to be copied here: {public.name}, from {site}, where it is made")
    click.echo("A secret file must stay readable by its owner alone (chmod 600).")
    if replace and made:
        click.echo(
            "Runs that go on: end them at all sites, and continue them once the new public keys are copied. A process "
            "reads the keys as it starts, also in the middle of a run, and those with the old ones do not admit it."
        )
