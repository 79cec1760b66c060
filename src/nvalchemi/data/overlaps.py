"""Atoms that are closer together than any bond, periodic images included."""

import numpy as np

from nvalchemi.data.batch import Batch


def closest_pairs(batch: Batch, share: float) -> dict[int, float]:
    """Structures with atoms closer than ``share`` of the sum of their covalent radii.

    Parameters
    ----------
    batch : Batch
        The structures; atoms whose positions are not finite are left out.
    share : float
        Of the sum of the covalent radii. The shortest bonds (H2, N2: 1.2, and those of matter compressed to half its
        volume: 0.8) stay well above 0.6.

    Returns
    -------
    dict of int to float
        Number of the graph → its smallest such distance, Å.
    """
    from ase.data import covalent_radii
    from scipy.spatial import KDTree

    if batch.num_nodes == 0:
        return {}
    radii = share * covalent_radii[batch.atomic_numbers.cpu().numpy()]
    radius = 2 * float(radii.max())
    graph, position, atom = _with_images(batch, radius)
    finite = np.isfinite(position).all(axis=1)
    graph, position, atom = graph[finite], position[finite], atom[finite]
    # Graphs lie apart along a fourth axis, so that one search with the largest radius serves all.
    points = np.concatenate([position, 2 * radius * graph[:, None]], axis=1)
    pairs = KDTree(points).query_pairs(radius, output_type="ndarray")
    i, j = pairs[:, 0], pairs[:, 1]
    distance = np.linalg.norm(points[i] - points[j], axis=1)
    close = distance < radii[atom[i]] + radii[atom[j]]
    smallest = np.full(batch.num_graphs, np.inf)
    np.minimum.at(smallest, graph[i[close]], distance[close])
    return {int(k): float(smallest[k]) for k in np.flatnonzero(np.isfinite(smallest))}


def _with_images(batch: Batch, radius: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Graph, position and number of every atom and of those periodic images that lie within ``radius`` of its cell."""
    graph = batch.batch_idx.cpu().numpy()
    position = batch.positions.detach().cpu().double().numpy()
    atom = np.arange(len(position))
    if "cell" not in batch or "pbc" not in batch:
        return graph, position, atom
    cell = batch.cell.detach().cpu().double().numpy()
    pbc = batch.pbc.cpu().numpy() & (np.abs(np.linalg.det(cell)) > 1e-6)[:, None]
    inverse = np.zeros_like(cell)
    valid = pbc.any(axis=1) & np.isfinite(cell).all(axis=(1, 2))
    inverse[valid] = np.linalg.inv(cell[valid])
    fractional = np.einsum("ni,nij->nj", position, inverse[graph])
    # 1 / height of the cell along each vector is the norm of a column of its inverse.
    margin = np.minimum(radius * np.linalg.norm(inverse, axis=1), 1.0)[graph]
    shift = np.where(pbc[graph], -np.floor(fractional), 0.0)
    shift[~np.isfinite(shift)] = 0.0
    fractional += shift
    position = position + np.einsum("ni,nij->nj", shift, cell[graph])
    out = [(graph, position, atom)]
    for image in np.ndindex(3, 3, 3):
        move = np.array(image) - 1
        if not move.any():
            continue
        moved = fractional + move
        within = pbc[graph] & (moved >= -margin) & (moved <= 1 + margin)
        near = (within | (move == 0)).all(axis=1)
        out.append((graph[near], position[near] + move @ cell[graph[near]], atom[near]))
    graph, position, atom = (np.concatenate(parts) for parts in zip(*out, strict=True))
    return graph, position, atom
