"""A site's home folder: damage is found and named, links are not followed, old runs can be removed."""

import json
import os
import re
import shutil
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lone_site import RUN, ask, greet, joined, make_site, offer, request, same, small
from typer.testing import CliRunner

from kills import Kill
from potluck.cli.app import app
from potluck.deploy.durable_record import MANIFEST, DurableRecord
from potluck.deploy.evaluations import Evaluations
from potluck.deploy.joined_runs import JoinedRuns
from potluck.deploy.kept_welcome import KeptWelcome
from potluck.deploy.pruning import kept_runs, prune
from potluck.deploy.record_files import RecordFiles, stays
from potluck.deploy.site import kept_secret
from potluck.engine.frames import listening
from potluck.engine.protocol import Answer, Examination, Failure, Stamp
from potluck.errors import ConfigError, RunError


def flip(path, place=-5):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture
def site(tmp_path):
    found = joined(tmp_path)
    for round_ in (1, 2):
        ask(found, request(small(found), round_=round_, accepted=round_ - 1))
    return found


def files(site, suffix):
    return sorted(site.resident.record.folder.glob(f"*.{suffix}"))


@pytest.mark.parametrize("suffix", ["safetensors", "answer", "json"])
def test_a_flipped_bit_is_found_and_the_file_named(site, tmp_path, capsys, suffix):
    damaged = files(site, suffix)[-1]
    flip(damaged, -9)
    again = make_site(tmp_path)
    order = request(small(site), round_=2, accepted=1)
    if suffix == "safetensors":
        order = request(small(site), round_=3, accepted=2)
    reply = ask(again, order)
    assert reply.reason == "client 0: RunError at the site; the log of its worker says more"
    assert str(damaged) in capsys.readouterr().err


READERS = {
    f"runs/{RUN}.json": KeptWelcome.read,
    f"runs/{RUN}.evaluations": lambda file: vars(Evaluations(file.with_suffix(""))),
    f"runs/{RUN}/record.json": lambda file: DurableRecord(file.parent).history,
    "joined.json": lambda file: JoinedRuns(file.parent)._names,
    "secret": lambda file: kept_secret(file.parent, RUN),
}


def flips(path):
    """A file with a bit of each of its bytes turned in turn, the lowest of digits, and whole again in the end."""
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        data = bytearray(whole)
        data[place] ^= 1 << (0 if chr(byte).isdigit() else place % 8)
        path.write_bytes(data)
        yield place
    path.write_bytes(whole)


@pytest.mark.parametrize("name", READERS)
def test_whichever_bit_flips_in_a_file_it_is_read_as_it_was_or_refused(tmp_path, name):
    site = joined(tmp_path, simulated=False)
    ask(site, request(small(site)))
    ask(site, Examination("0", small(site), Stamp(RUN, 1, 1, 0, 0), ("mix-large",)))
    read, file, refused = READERS[name], site.home / name, 0
    wanted = read(file)
    for place in flips(file):
        try:
            assert read(file) == wanted, place
        except RunError:
            refused += 1
    assert refused > 50
    assert read(file) == wanted


def test_whatever_file_of_a_home_is_damaged_no_other_numbers_leave(tmp_path):
    """A worker starts again over a damaged file, and is asked what it was asked before, and what comes next."""
    home = tmp_path / "home"
    site = joined(home, simulated=False, rounds=9)
    for round_ in (1, 2, 3):
        ask(site, request(small(site), round_=round_, accepted=round_ - 1))
        ask(site, Examination("0", small(site), Stamp(RUN, round_, 1, 0, round_ - 1), ("mix-large",)))
    shutil.copytree(home, tmp_path / "start")

    def replies():
        site, down = make_site(home, simulated=False), small(joined(tmp_path / "down"))
        orders = [request(down, round_=3, accepted=2), request(down, round_=4, accepted=3)]
        orders += [Examination("0", down, Stamp(RUN, 3, 1, 0, 2), ("mix-large",))]
        return [ask(site, order) for order in orders]

    wanted, seen = replies(), []
    names = [
        path.relative_to(tmp_path / "start") for path in (tmp_path / "start").rglob("*") if path.is_file()
    ]
    for name in names:
        for place in (7, -9):
            shutil.rmtree(home)
            shutil.copytree(tmp_path / "start", home)
            flip(home / name, place)
            for reply, other in zip(replies(), wanted, strict=True):
                seen.append(isinstance(reply, Failure))
                assert seen[-1] or (same(reply, other) and reply.report.metrics == other.report.metrics), name
    assert 20 < sum(seen) < len(seen)


def test_a_site_goes_on_with_files_that_an_earlier_version_wrote_without_checksums(tmp_path):
    site = joined(tmp_path, simulated=False)
    down = small(site)
    question = Examination("0", down, Stamp(RUN, 1, 1, 0, 0), ("mix-large",))
    first, measured = ask(site, request(down)), ask(site, question)
    runs = site.home / "runs"
    for suffix in ("json", "evaluations"):
        value = json.loads((runs / f"{RUN}.{suffix}").read_text())
        del value["sha256"]
        (runs / f"{RUN}.{suffix}").write_text(json.dumps(value, indent=1))
    again = make_site(tmp_path, simulated=False)
    assert same(first, ask(again, request(down)))
    assert measured.report.metrics == ask(again, question).report.metrics
    assert Evaluations(runs / RUN).number(1, "another") == 2
    assert "sha256" in json.loads((runs / f"{RUN}.json").read_text())  # from now on


def test_a_state_of_a_terabyte_that_is_not_on_the_disk_is_not_read(tmp_path):
    files = RecordFiles(tmp_path / "record", MANIFEST)
    name = files.write_state({"a": torch.ones(3)})
    os.truncate(files.folder / name, 1 << 40)
    with pytest.raises(RunError, match=rf"{name} cannot be read: it has 1,099,.* on the disk"):
        files.read_state(name)


def test_files_of_a_record_without_their_manifest_are_not_taken_for_a_new_one(site, tmp_path, capsys):
    """It would draw the same private noise once more, and count from the start."""
    (site.resident.record.folder / "record.json").unlink()
    assert isinstance(ask(make_site(tmp_path), request(small(site))), Failure)
    assert "record.json is missing" in capsys.readouterr().err
    assert files(site, "answer")  # nothing was removed


def test_a_missing_file_is_named(site, tmp_path, capsys):
    files(site, "answer")[-1].unlink()
    ask(make_site(tmp_path), request(small(site), round_=2, accepted=1))
    assert f"{files(site, 'safetensors')[-1].parent}" in capsys.readouterr().err


def test_a_record_names_no_file_elsewhere(site, tmp_path, capsys):
    record = site.resident.record
    other = tmp_path / "precious"
    other.write_text("mine")
    record.history.now.answer = f"../../../{other.name}"
    record._stand(record.history.at.key, request(small(site), round_=2, accepted=1).stamp)
    ask(make_site(tmp_path), request(small(site), round_=2, accepted=1))
    assert "which is no file beside it" in capsys.readouterr().err
    assert other.read_text() == "mine"


def test_links_in_a_record_are_neither_read_nor_written_through(site, tmp_path, capsys):
    folder, target = site.resident.record.folder, tmp_path / "precious"
    target.write_bytes(files(site, "answer")[-1].read_bytes())
    files(site, "answer")[-1].unlink()
    (folder / "spare").symlink_to(target)
    answer = site.resident.record.history.now.answer
    (folder / answer).symlink_to(target)
    before = target.read_bytes()
    ask(make_site(tmp_path), request(small(site), round_=2, accepted=1))
    assert "it is a link, which is not followed" in capsys.readouterr().err
    assert target.read_bytes() == before
    assert not (folder / "spare").is_symlink()


@pytest.mark.parametrize("name", ["runs", f"runs/{RUN}"])
def test_a_folder_that_is_a_link_is_refused(tmp_path, capsys, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "keep.txt").write_text("mine")
    link = tmp_path / "0" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    assert "RunError at the site" in greet(make_site(tmp_path), offer()).reason
    assert "is a link, which is not followed" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["keep.txt"]


def test_a_secret_is_never_readable_by_others_and_no_link(tmp_path, monkeypatch):
    seen = []
    whole = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append(os.fstat(handle).st_mode), whole(handle)))
    kept_secret(tmp_path / "home", RUN)
    assert [stat.S_IMODE(mode) for mode in seen] == [0o600, 0o700]  # the file, then its folder
    (tmp_path / "home" / "secret").rename(tmp_path / "other")
    (tmp_path / "home" / "secret").symlink_to(tmp_path / "other")
    with pytest.raises(RunError, match="it is a link, which is not followed"):
        kept_secret(tmp_path / "home", RUN)
    (tmp_path / "home" / "secret").unlink()
    (tmp_path / "home" / "secret").write_text("?")
    with pytest.raises(RunError, match="secret holds no secret"):
        kept_secret(tmp_path / "home", RUN)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:14],
        lambda text: text[:-1],
        lambda text: "53",
        lambda text: re.sub(r"\d(?=,)", lambda digit: str(9 - int(digit[0])), text, count=1),
        lambda text: text.replace(": ", ": 1", 1),
    ],
)
def test_a_secret_that_was_cut_or_changed_is_refused(tmp_path, change):
    whole = kept_secret(tmp_path, RUN)
    file, text = tmp_path / "secret", (tmp_path / "secret").read_text()
    file.write_text(change(text))
    assert file.read_text() != text
    with pytest.raises(RunError, match="holds no secret that is as it was written"):
        kept_secret(tmp_path, RUN)
    file.write_text(text)
    assert kept_secret(tmp_path, RUN) == whole


def test_a_site_takes_part_only_in_what_is_written_down(tmp_path, monkeypatch):
    full = RunError("cannot write: No space left on device")
    site = make_site(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("potluck.deploy.site.JoinedRuns.add", Mock(side_effect=full))
        assert isinstance(greet(site, offer()), Failure)
        assert (site.run, site.resident) == ("", None)
    assert not isinstance(greet(site, offer()), Failure)
    assert json.loads((site.home / "joined.json").read_text())["runs"] == [RUN]


# --- old runs -------------------------------------------------------------------------------------------


@pytest.fixture
def home(site):
    """A site with a finished run of two rounds, and one that has not begun."""
    greet(site, offer(run="b2"))
    return site.home


def test_finished_runs_are_removed_and_others_only_when_asked(home, tmp_path):
    assert {one.run: (one.round, one.finished) for one in kept_runs(home)} == {
        RUN: (2, True),
        "b2": (0, False),
    }
    (home / "runs" / RUN / "note.txt").write_text("somebody else's")
    assert [one.run for one in prune(home)] == [RUN]
    assert (home / "runs" / RUN / "note.txt").exists()  # no file of a record
    assert [one.run for one in kept_runs(home)] == ["b2"]
    (home / "runs" / "b2").mkdir()
    with Kill("/b2"):  # at the last operation of all
        prune(home, unfinished=True)
    assert (home / "runs" / "b2").is_dir()
    for name in (".b2.evaluations.7.unfinished", ".b2.json.ab12cd34.unfinished"):
        (home / "runs" / name).write_text("half")
    assert prune(home) == []
    assert sorted(path.name for path in (home / "runs").iterdir()) == [RUN]  # nothing is left of b2
    assert (home / "secret").exists() is False  # a simulated site has none
    assert not isinstance(greet(make_site(tmp_path), offer(run="c3")), Failure)


def test_the_last_runs_stay(home):
    assert prune(home, keep=2) == []
    assert [one.run for one in prune(home, keep=1, unfinished=True)] == [kept_runs_of_old(home)]


def kept_runs_of_old(home):
    """The run that was there and no longer is."""
    return ({RUN, "b2"} - {one.run for one in kept_runs(home)}).pop()


def test_links_are_removed_and_not_followed(home, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "record.json").write_text("{}")
    (home / "runs" / "c3.json").write_text((home / "runs" / "b2.json").read_text())
    (home / "runs" / "c3").symlink_to(other)
    assert {one.run for one in prune(home, unfinished=True)} == {RUN, "b2", "c3"}
    assert [path.name for path in other.iterdir()] == ["record.json"]


def test_the_command_says_what_it_removed(home):
    done = CliRunner().invoke(app, ["prune", str(home), "--json"])
    assert done.exit_code == 0, done.output
    assert [one["run"] for one in json.loads(done.stdout)["removed"]] == [RUN]
    done = CliRunner().invoke(app, ["prune", str(home)])
    assert "nothing to remove; 1 unfinished run stays" in done.stdout
    done = CliRunner().invoke(app, ["prune", str(home.parent)])
    assert done.exit_code == 2
    assert "is no home folder of a site" in done.stderr


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"welcome": {"experiment": {"training": {"rounds": Infinity}}}}', None]
)
def test_a_record_that_nobody_wrote_is_told(home, text):
    (home / "runs" / "c3.json").write_text(text or "")
    if text is None:
        os.truncate(home / "runs" / "c3.json", 1 << 36)  # without a byte on the disk
    done = CliRunner().invoke(app, ["prune", str(home)])
    assert (done.exit_code, f"removed run {RUN} (round 2" in done.stdout) == (0, True)
    assert "run c3 stays: " in done.stdout
    assert "c3.json cannot be read" in done.stdout
    done = CliRunner().invoke(app, ["prune", str(home), "--unfinished"])
    assert (done.exit_code, "removed run c3" in done.stdout, kept_runs(home)) == (0, True, [])


def unreadable(path):
    path.write_text("{")


@pytest.mark.parametrize(
    "damage",
    [unreadable, Path.mkdir, lambda path: path.symlink_to("/etc/passwd")],
    ids=["{", "folder", "link"],
)
def test_a_damaged_file_of_an_old_run_ends_no_other(home, tmp_path, damage):
    damage(home / "runs" / "c3.json")
    again = make_site(tmp_path)
    assert isinstance(ask(again, request(small(joined(tmp_path)), round_=2, accepted=1)), Answer)
    assert not isinstance(greet(again, offer(run="d4")), Failure)
    assert isinstance(greet(again, offer(run="c3")), Failure)
    kept = {"c3"} if damage is not Path.mkdir else set()  # a folder of that name is no file of a run
    assert {one.run for one in kept_runs(home) if one.damaged} == kept
    assert {one.run for one in prune(home, unfinished=True)} == {RUN, "b2", "d4"} | kept


def test_a_damaged_record_of_an_old_run_ends_no_other_and_can_be_removed(home):
    flip(home / "runs" / RUN / "record.json")
    assert {one.run: bool(one.damaged) for one in kept_runs(home)} == {RUN: True, "b2": False}
    assert prune(home) == []
    assert len(prune(home, unfinished=True)) == 2


def test_the_name_of_a_run_cannot_steer_a_terminal(home):
    (home / "runs" / "b2.json").rename(home / "runs" / "b\x1b[2J\n2.json")
    done = CliRunner().invoke(app, ["prune", str(home), "--unfinished"])
    assert (done.exit_code, "\x1b" in done.stdout, "removed run b 2 (" in done.stdout) == (0, False, True)


def test_a_folder_with_runs_in_it_is_not_yet_a_home(tmp_path: Path) -> None:
    mine = tmp_path / "runs" / "mine"
    mine.mkdir(parents=True)
    (tmp_path / "runs" / "notes.json").write_text("{}")
    with pytest.raises(RunError, match="is no home folder of a site"):
        prune(tmp_path, unfinished=True)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert len([*(tmp_path / "runs").iterdir()]) == 2


def test_only_a_socket_gives_way_to_a_socket(tmp_path: Path) -> None:
    taken = tmp_path / "mine.txt"
    taken.write_text("mine")
    wrong = {taken: "is no socket", tmp_path / "none" / "door": "cannot open a socket at .*none"}
    for path, sentence in {**wrong, tmp_path / ("é" * 60): "at most 100 bytes"}.items():
        with pytest.raises(ConfigError, match=sentence), listening(path):
            pass
    assert taken.read_text() == "mine"
    with listening(tmp_path / "door"):
        pass


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (("done", "{key}", "state"), 3),
        (("done", "{key}", "round"), "x"),
        (("done", "{key}", "before"), "{key}"),
        (("at", "key"), ""),
        (("tried", "1"), 1e400),
        (("forgotten",), 1e400),
    ],
)
def test_a_record_that_was_written_by_somebody_else_is_refused_in_a_sentence(tmp_path, names, value):
    site = joined(tmp_path, simulated=False)
    ask(site, request(small(site)))
    files, manifest = RecordFiles(site.home / "runs" / RUN, MANIFEST), site.home / "runs" / RUN / MANIFEST
    values = files.read_manifest()
    (key,) = values["done"]
    place = values
    *path, last = (name.replace("{key}", key) for name in names)
    for name in path:
        place = place[name]
    place[last] = value.replace("{key}", key) if isinstance(value, str) else value
    files.write_manifest(values)
    with pytest.raises(RunError, match=r"the record in .* cannot be read \([^\n]+\); bring the folder back"):
        DurableRecord(manifest.parent)
    (kept,) = kept_runs(site.home)
    assert "cannot be read" in kept.damaged


def test_a_count_of_evaluations_beyond_measure_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "run.evaluations").write_text('{"counted": {"1": 1e400}, "known": {}}')
    with pytest.raises(RunError, match="cannot be read"):
        Evaluations(tmp_path / "run")


def test_a_folder_in_place_of_a_record_stays_and_keeps_no_file_of_the_run(home):
    record = home / "runs" / RUN / "record.json"
    record.unlink()
    record.mkdir()
    assert prune(home) == []
    assert {one.run for one in prune(home, unfinished=True)} == {RUN, "b2"}
    assert [*record.parent.iterdir()] == [record]
    assert kept_runs(home) == prune(home) == []


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_home_that_was_moved_is_not_begun_anew(tmp_path, capsys, made_anew):
    """Whoever moves it would have half of a record in each of two places, and the secret in one."""
    site = joined(tmp_path)
    home = site.home
    with stays(home) as site.check_place:
        assert isinstance(ask(site, request(small(site))), Answer)
        home.rename(tmp_path / "moved")
        if made_anew:
            home.mkdir()
        refused = ask(site, request(small(site), 2, accepted=1))
        assert isinstance(refused, Failure)
        assert refused.lost  # it may be put back
        assert f"the folder {home} was moved or removed while it was in use" in capsys.readouterr().err
        assert [*home.iterdir()] == [] if made_anew else not home.exists()
        if made_anew:
            home.rmdir()
        (tmp_path / "moved").rename(home)
        assert isinstance(ask(site, request(small(site), 2, accepted=1)), Answer)
