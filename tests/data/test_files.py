"""Files: formats, streaming, broken input, atomic writing."""

import gzip
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.spacegroup import crystal

from nvalchemi.data import AtomicData, Batch, iread, read, write
from nvalchemi.data.io import output_format


def labelled(k=0):
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.01, seed=k)
    atoms.info["name"] = f"c{k}"
    atoms.calc = SinglePointCalculator(
        atoms, energy=-1.0 - k, forces=np.full((4, 3), k + 0.5), stress=np.arange(6.0)
    )
    return AtomicData.from_atoms(atoms, dtype=torch.float64)


def names(frames):
    return [data.info["name"] for data in frames]


@pytest.fixture
def three():
    path = Path("three.extxyz")
    assert write(path, [labelled(k) for k in range(3)]) == 3
    return path


@pytest.fixture
def frames(three):
    """Text of the three frames, of six lines each."""
    lines = three.read_text().splitlines(keepends=True)
    return ["".join(lines[6 * k : 6 * k + 6]) for k in range(3)]


# ---------------------------------------------------------------------- formats
@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("a.extxyz", True),
        ("a.xyz", True),
        ("a.extxyz.gz", True),
        ("a.xyz.bz2", True),
        ("a.xyz.xz", True),
        ("a.traj", True),
        ("a.traj.gz", True),
        ("a.db", True),
        ("a.json", True),
        ("a.cif", False),
        ("a.cif.gz", False),
    ],
)
def test_formats_of_many_structures(name, labels):
    written = [labelled(k) for k in range(3)]
    assert write(name, written) == 3
    back = read(name, dtype=torch.float64)
    assert os.listdir() == [name]
    for before, after in zip(written, back, strict=True):
        # A cif holds the atoms inside the cell, with few digits; extxyz holds eight decimals.
        away = torch.linalg.solve(before.cell[0].T, (after.positions - before.positions).T)
        away = away - away.round() if "cif" in name else away
        assert away.abs().max() < (1e-3 if "cif" in name else 1e-8)
        assert torch.allclose(before.cell, after.cell)
        assert before.atomic_numbers.tolist() == after.atomic_numbers.tolist()
        if labels:
            assert after.energy.item() == before.energy.item()
            assert torch.allclose(before.forces, after.forces)


@pytest.mark.parametrize("name", ["POSCAR", "a.vasp", "CONTCAR.gz"])
def test_formats_of_one_structure(name):
    assert write(name, labelled()) == 1
    assert torch.allclose(read(name, 0, dtype=torch.float64).positions, labelled().positions)
    with pytest.raises(ValueError, match=f"{name}: format 'vasp' holds one structure, not 2"):
        write(name, [labelled(), labelled()])
    assert read(name, 0).num_nodes == 4


def test_a_batch_is_written_structure_by_structure():
    write("b.extxyz", Batch.from_data_list([labelled(k) for k in range(3)]))
    assert names(read("b.extxyz")) == ["c0", "c1", "c2"]


def test_the_same_set_comes_back_from_extxyz():
    atoms = bulk("Cu", cubic=True)
    atoms.pbc = [True, True, False]
    atoms.set_momenta(np.arange(12.0).reshape(4, 3))
    atoms.set_tags([1, 2, 3, 4])
    atoms.set_initial_charges([0.5, -0.5, 0.25, 0])
    atoms.set_constraint(FixAtoms([1]))
    atoms.info.update(charge=-1, spin=2, name="slab")
    write("first.extxyz", AtomicData.from_atoms(atoms, dtype=torch.float64))
    data = read("first.extxyz", 0, dtype=torch.float64)
    assert data.atom_categories.tolist() == [0, 1, 0, 0]
    assert (data.charge.item(), data.spin.item()) == (-1, 2)
    write("second.extxyz", data)
    assert Path("first.extxyz").read_text() == Path("second.extxyz").read_text()
    back = data.to_atoms()
    assert back.pbc.tolist() == [True, True, False]
    assert np.allclose(back.get_momenta(), atoms.get_momenta(), rtol=1e-7)
    assert back.get_tags().tolist() == [1, 2, 3, 4]
    assert back.get_initial_charges().tolist() == [0.5, -0.5, 0.25, 0]
    assert back.constraints[0].index.tolist() == [1]


def test_custom_fields_in_extxyz():
    data = labelled()
    data.add_node_property("user", torch.arange(8).reshape(4, 2))
    data.add_node_property("tensors", torch.arange(16.0, dtype=torch.float64).reshape(4, 2, 2))
    data.add_node_property("nothing", torch.zeros(4, 0))
    data.add_system_property("gap", 1.5)
    write("c.extxyz", data)
    back = read("c.extxyz", 0, fields={"gap": "gap"}, dtype=torch.float64)
    assert torch.equal(back.user, data.user)
    assert torch.equal(back.tensors, data.tensors.reshape(4, 4))
    assert back.gap.tolist() == [[1.5]]


@pytest.mark.parametrize(
    ("value", "read_back"),
    [
        ("", ""),
        ("two\nlines", "two lines"),
        ("quoted \"and\" 'so'", "quoted \"and\" 'so'"),
        ("k=v", "k=v"),
        ([[1], [1, 2]], "[[1], [1, 2]]"),
        ({"a": 1}, {"a": 1}),
        (2, 2),
    ],
)
def test_no_info_spoils_the_frame_it_is_in(value, read_back):
    atoms = molecule("H2O")
    atoms.pbc = [True, True, False]
    atoms.cell = [9, 9, 9]
    atoms.info["user"] = value
    write("i.extxyz", AtomicData.from_atoms(atoms))
    back = read("i.extxyz", 0)
    assert back.info == {"user": read_back}
    assert back.pbc.tolist() == [[True, True, False]]


def test_info_of_none_is_left_out_of_xyz_and_objects_with_a_warning():
    data = labelled()
    data.info.update(nothing=None)
    write("n.extxyz", data)
    assert set(read("n.extxyz", 0).info) == {"name"}
    data.info.update(thing=object())
    with pytest.warns(UserWarning, match="thing"):
        write("n.extxyz", data)
    assert set(read("n.extxyz", 0).info) == {"name"}


def test_complex_arrays_are_refused_by_name():
    data = labelled()
    data.add_node_property("phases", torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex array 'phases'"):
        write("p.extxyz", data)
    assert os.listdir() == []


def test_a_cif_with_its_spacegroup_goes_on_to_every_format():
    salt = crystal(["Na", "Cl"], [(0, 0, 0), (0.5, 0.5, 0.5)], spacegroup=225, cellpar=[5.64] * 3 + [90] * 3)
    salt.write("salt.cif")
    data = read("salt.cif", 0)
    assert {"spacegroup", "occupancy"} <= set(data.info)
    assert data.num_nodes == 8
    for name in ("salt.extxyz", "salt.cif", "salt.traj", "salt.json"):
        assert write(name, data) == 1
        assert read(name, 0).chemical_formula == "Cl4Na4"


def test_a_cif_joins_structures_of_other_files():
    write("a.cif", labelled())
    batch = Batch.from_data_list(
        [read("a.cif", 0, dtype=torch.float64), AtomicData(torch.zeros(1, 3).double(), [18])]
    )
    assert batch.num_nodes == 5


def test_structures_of_no_and_one_atom():
    empty = AtomicData([], [], cell=np.eye(3))
    lone = AtomicData([[0, 0, 0]], [18])
    write("e.extxyz", [empty, lone, empty])
    assert [data.num_nodes for data in read("e.extxyz")] == [0, 1, 0]


# ---------------------------------------------------------------------- which frames
@pytest.mark.parametrize("suffix", ["extxyz", "traj"])
@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (":", ["c0", "c1", "c2"]),
        ("::2", ["c0", "c2"]),
        ("::-1", ["c2", "c1", "c0"]),
        ("-2:", ["c1", "c2"]),
        (":-1", ["c0", "c1"]),
        ("5:", []),
        ("-1", ["c2"]),
        (slice(1, 2), ["c1"]),
        (slice(None, None, -2), ["c2", "c0"]),
    ],
    ids=str,
)
def test_index(three, suffix, index, expected):
    path = Path(f"three.{suffix}")
    if suffix == "traj":
        write(path, read(three))
    assert names(read(path, index)) == expected


@pytest.mark.parametrize(("index", "expected"), [(0, "c0"), (2, "c2"), (-1, "c2"), (-3, "c0")])
def test_an_integer_index_gives_one_structure(three, index, expected):
    assert read(three, index).info["name"] == expected


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_out_of_range(three, index):
    with pytest.raises(IndexError, match=f"three.extxyz has no frame {index}"):
        read(three, index)


@pytest.mark.parametrize("index", ["a", "1,2"])
def test_an_index_that_is_none(three, index):
    with pytest.raises(ValueError, match=f"index '{index}' does not choose frames"):
        read(three, index)


# ---------------------------------------------------------------------- streaming
def test_reading_takes_the_memory_of_one_frame():
    text = "1\nProperties=species:S:1:pos:R:3\nH 0 0 0\n" * 20_000
    Path("long.extxyz").write_text(text)
    first = next(iread("long.extxyz"))  # imports and caches
    assert first.num_nodes == 1
    tracemalloc.start()
    stream = iread("long.extxyz")
    for _ in range(300):
        next(stream)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(text) / 2


def test_writing_consumes_one_structure_at_a_time():
    seen = []

    def stream():
        for k in range(3):
            partial = [name for name in os.listdir() if "partial" in name]
            seen.append(len(partial))
            yield labelled(k)

    assert write("s.extxyz", stream()) == 3
    assert seen == [1, 1, 1]  # the file is open before the first structure exists
    assert names(iread("s.extxyz")) == ["c0", "c1", "c2"]


# ---------------------------------------------------------------------- broken input
def broken(frames):
    first, second, third = frames
    return {
        "garbage between": (
            first + "foo\nbar\n" + third,
            1,
            "expected a number of atoms, found 'foo'",
            ["c0", "c2"],
        ),
        "too few atoms": (
            first + "".join(second.splitlines(True)[:4]) + third,
            1,
            "4 atoms announced, 2 found",
            ["c0", "c2"],
        ),
        "too many atoms": (
            first + second.replace("4\n", "3\n", 1) + third,
            1,
            "more atoms than the 3",
            ["c0", "c2"],
        ),
        "no number": (first + second.replace("Cu ", "Cu x ", 1) + third, 1, "'x'", ["c0", "c2"]),
        "no element": (first + second.replace("Cu ", "Qq ", 1) + third, 1, "Qq", ["c0", "c2"]),
        "cut in a line": ((first + second + third)[:-30], 2, ".", ["c0", "c1"]),
        "cut between lines": (
            "".join((first + second + third).splitlines(True)[:-2]),
            2,
            "truncated: 4 .* 2 found",
            ["c0", "c1"],
        ),
        "header only": (first + "4\n", 1, "truncated: 4 atoms announced, 0 found", ["c0"]),
        "binary between": (
            first.encode() + bytes(range(128, 256)) + b"\n" + third.encode(),
            1,
            "expected a number",
            ["c0", "c2"],
        ),
        "latin-1": (
            first.encode() + second.replace("c1", "\xe9").encode("latin-1") + third.encode(),
            1,
            "utf-8",
            ["c0", "c2"],
        ),
        "bad label": (
            first + second.replace("energy=-2.0", "energy=none") + third,
            1,
            "'energy'",
            ["c0", "c2"],
        ),
        "all binary": (bytes(range(128, 256)) * 20, 0, "expected a number", []),
        "text": ("hello\nworld\n", 0, "expected a number of atoms, found 'hello'", []),
    }


@pytest.mark.parametrize("case", list(broken([""] * 3)))
def test_a_broken_frame_is_named_or_skipped(frames, case):
    content, number, message, left = broken(frames)[case]
    Path("x.extxyz").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"x.extxyz, frame {number}: .*{message}"):
        read("x.extxyz")
    with pytest.warns(UserWarning, match=rf"x.extxyz: skipped 1 frame\(s\) that cannot be read: {number}"):
        assert names(read("x.extxyz", on_error="skip")) == left


def test_frames_before_a_broken_one_come_out_first(frames):
    Path("x.extxyz").write_text(frames[0] + frames[1] + "foo\n")
    stream = iread("x.extxyz")
    assert names([next(stream), next(stream)]) == ["c0", "c1"]
    with pytest.raises(ValueError, match="frame 2"):
        next(stream)


def test_many_broken_frames_in_a_row(frames):
    Path("x.extxyz").write_text("4\nx\n" * 5000 + frames[0])
    with pytest.warns(UserWarning, match="skipped 5000 frame"):
        assert names(read("x.extxyz", on_error="skip")) == ["c0"]


@pytest.mark.parametrize("text", ["{}\r\n", "\n\n{}\n\n"], ids=["line ends", "blank lines"])
def test_harmless_differences(frames, text):
    lines = frames[0].rstrip().replace("\n", "\r\n" if "\r" in text else "\n")
    Path("x.extxyz").write_text(text.format(lines), newline="")
    assert names(read("x.extxyz")) == ["c0"]


def test_plain_xyz_without_comments():
    Path("p.xyz").write_text("2\n\nH 0 0 0\nH 0 0 1\n2\nnext\nH 0 0 0\nO 0 0 1\n")
    assert [data.chemical_formula for data in read("p.xyz")] == ["H2", "HO"]


def test_a_truncated_compressed_file(frames):
    Path("x.extxyz.gz").write_bytes(gzip.compress("".join(frames * 500).encode())[:-2000])
    with pytest.raises(ValueError, match=r"x.extxyz.gz, frame \d+: "):
        read("x.extxyz.gz")
    with pytest.warns(UserWarning, match=r"skipped [12] frame"):
        assert len(read("x.extxyz.gz", on_error="skip")) > 300


@pytest.mark.parametrize("name", ["a.extxyz.gz", "a.xyz.bz2", "a.xyz.xz"])
def test_a_file_that_is_not_compressed_as_its_name_says(frames, name):
    Path(name).write_text(frames[0])
    with pytest.raises(ValueError, match=f"{name}: cannot be read"):
        read(name)


def test_a_truncated_trajectory(three):
    write("t.traj", read(three))
    content = Path("t.traj").read_bytes()
    Path("t.traj").write_bytes(content[:-200])
    with pytest.raises(ValueError, match=r"t\.traj, frame 2: "):
        read("t.traj")
    with pytest.warns(UserWarning, match="skipped 1 frame"):
        assert names(read("t.traj", on_error="skip")) == ["c0", "c1"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.extxyz", "", "empty.extxyz: the file is empty"),
        ("x.cif", "data_x\nfoo", "x.cif, frame 0: "),
        ("x.json", "{", "x.json, frame 0: "),
        ("x.db", "no data base", "x.db, frame 0: "),
        ("POSCAR", "x\n1.0\n", "POSCAR, frame 0: "),
        ("x.unknown", "some text", "x.unknown: ASE cannot read a format 'unknown'"),
        ("x.png", "some text", "x.png: .*"),
    ],
)
def test_files_of_no_structure(name, content, message):
    Path(name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read(name)


def test_paths_that_are_no_files():
    with pytest.raises(FileNotFoundError, match=r"no such file: nowhere.xyz"):
        iread("nowhere.xyz")
    Path("folder.xyz").mkdir()
    with pytest.raises(FileNotFoundError, match=r"folder.xyz is not a file"):
        iread("folder.xyz")


def test_wrong_options_are_not_blamed_on_the_frames(three):
    with pytest.raises(TypeError, match="forces_kye"):
        read(three, on_error="skip", forces_kye="F")
    with pytest.raises(RuntimeError, match="device"):
        read(three, on_error="skip", device="nowhere")
    with pytest.raises(ValueError, match="cannot read a format 'nothing'"):
        read(three, on_error="skip", format="nothing")
    with pytest.raises((ValueError, TypeError), match="on_error"):
        read(three, on_error="ignore")


# ---------------------------------------------------------------------- labels
def test_labels_under_another_key_are_pointed_out():
    atoms = molecule("H2O")
    atoms.info["REF_energy"] = -1.0
    atoms.set_array("REF_forces", np.zeros((3, 3)))
    write("r.extxyz", [AtomicData.from_atoms(a) for a in (atoms, atoms, molecule("H2O"))])
    with pytest.warns(UserWarning, match=r"r\.extxyz: 3 of 3 frames") as caught:
        data = read("r.extxyz")[0]
    messages = sorted(str(w.message) for w in caught)
    assert "energy" not in data
    assert messages == [
        f"r.extxyz: 3 of 3 frames have no {label} under the key '{label}'; "
        f"2 have 'REF_{label}' ({label}_key=… says which to take)"
        for label in ("energy", "forces")
    ]


def test_labels_asked_for_and_not_there_are_counted():
    atoms = molecule("H2O")
    atoms.info["E"] = -1.0
    write("r.extxyz", [AtomicData.from_atoms(a) for a in (atoms, molecule("H2O"))])
    with pytest.warns(UserWarning, match="1 of 2 frames have no energy under the key 'E'$"):
        first, second = read("r.extxyz", energy_key="E")
    assert first.energy.item() == -1
    assert "energy" not in second
    with pytest.warns(UserWarning, match="2 of 2 frames have no gap under the key 'gap'"):
        read("r.extxyz", fields={"gap": "gap"})


def test_structures_without_any_label_are_no_reason_to_warn():
    write("u.extxyz", AtomicData.from_atoms(molecule("H2O")))
    assert "energy" not in read("u.extxyz", 0)


# ---------------------------------------------------------------------- writing
def failing():
    yield labelled()
    raise RuntimeError("no more")


@pytest.mark.parametrize("name", ["old.extxyz", "old.extxyz.gz", "old.traj"])
def test_a_failure_leaves_the_old_file_untouched(name):
    write(name, labelled(7))
    before = Path(name).read_bytes()
    with pytest.raises(RuntimeError, match="no more"):
        write(name, failing())
    assert Path(name).read_bytes() == before
    assert os.listdir() == [name]


def test_a_failure_leaves_nothing_where_nothing_was():
    with pytest.raises(RuntimeError, match="no more"):
        write("new.extxyz", failing())
    assert os.listdir() == []


@pytest.mark.parametrize("name", ["a.extxyz", "a.extxyz.gz", "a.xyz.bz2"])
def test_appending(name):
    write(name, labelled(0), append=True)
    assert write(name, [labelled(1), labelled(2)], append=True) == 2
    assert names(read(name)) == ["c0", "c1", "c2"]


def test_a_failure_while_appending_leaves_whole_frames():
    write("a.extxyz", labelled(5))
    with pytest.raises(RuntimeError, match="no more"):
        write("a.extxyz", failing(), append=True)
    assert names(read("a.extxyz")) == ["c5", "c0"]


def test_a_link_stays_a_link():
    Path("sub").mkdir()
    write("sub/real.extxyz", labelled(0))
    os.symlink("sub/real.extxyz", "link.extxyz")
    write("link.extxyz", labelled(1))
    assert Path("link.extxyz").is_symlink()
    assert names(read("sub/real.extxyz")) == ["c1"]


@pytest.mark.parametrize(
    ("path", "options", "error", "message"),
    [
        ("a.unknown", {}, ValueError, "a.unknown: no file format is known"),
        ("noext", {}, ValueError, "noext: no file format is known"),
        ("a.gpw", {}, ValueError, "format 'gpw' can be read but not written"),
        ("a.traj", {"append": True}, ValueError, "cannot append to a file of format 'traj'"),
        ("nowhere/a.extxyz", {}, FileNotFoundError, "no such folder: nowhere"),
        ("folder.extxyz", {}, IsADirectoryError, "folder.extxyz is a folder"),
    ],
)
def test_writing_refuses(path, options, error, message):
    Path("folder.extxyz").mkdir()
    with pytest.raises(error, match=message):
        write(path, labelled(), **options)
    assert os.listdir() == ["folder.extxyz"]


@pytest.mark.parametrize("data", [[Atoms("H")], [1]])
def test_only_structures_are_written(data):
    with pytest.raises(TypeError):
        write("a.extxyz", iter(data))
    assert os.listdir() == []


def test_output_format():
    assert output_format("a.xyz") == "extxyz"
    assert output_format("POSCAR") == "vasp"
    assert output_format("a", "extxyz") == "extxyz"
