"""Keys are replaced and revoked while a run goes on: it neither ends nor waits for who is out."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import sites
from links import FEDMRL, Link, Time, Told, is_evaluation, is_training, serve

from potluck.deploy.fingerprints import client_keys
from potluck.deploy.flower import superlinks
from potluck.deploy.flower.connections import Security
from potluck.deploy.flower.serve import chosen_keys
from potluck.deploy.key_folder import KeyFolder
from potluck.deploy.keyring import KeyRegister
from potluck.errors import ConfigError, RunError

KEYS = {client: f"SHA256:{client}" for client in sites.IDS}


class TiedLink(Link):
    """Sites whose nodes show keys; `swap` moves a client to a new node with another key."""

    def __init__(self, home):
        super().__init__(home)
        self.shown = {node: KEYS[site.client] for node, site in self.sites.items()}

    def keys(self):
        return self.shown

    def swap(self, client, key):
        old = next(node for node, site in self.sites.items() if site.client == client)
        new = max(self.sites) + 1
        self.sites[new] = self.sites.pop(old)
        self.shown[new] = key


class Folder:
    """Keys that an operator changes at some moment."""

    def __init__(self):
        self.now, self.told = dict(KEYS), dict(KEYS)

    def changed(self):
        if self.now == self.told:
            return {}
        self.told = dict(self.now)
        return dict(self.now)


def training(rounds=3, **others):
    return {
        "training": {"rounds": rounds, "quorum": 1.0, "batch_size": 16, "optimizer": {"lr": 0.05}} | others
    }


def play(tmp_path, link, folder, rounds=3, **others):
    told = Told()
    experiment = sites.federated(FEDMRL, **training(rounds, **others))
    result = serve(link, tmp_path / "run", experiment, told, keys=folder.now, changed_keys=folder.changed)
    return result, told


def after(link, client, round_, action):
    """Do something when a client is measured in a round."""
    done = []

    def lose(order):
        if is_evaluation(order, client, round_) and not done:
            done.append(True)
            action()

    link.lose = lose


def test_a_replaced_key_counts_from_the_next_exchange_and_changes_no_number(tmp_path):
    link, folder = TiedLink(tmp_path), Folder()

    def rotate():
        folder.now["1"] = "SHA256:new"
        link.swap("1", "SHA256:new")

    after(link, "2", 1, rotate)
    _, told = play(tmp_path, link, folder)
    assert "client 1: its key is SHA256:new from now on" in told.notices
    assert sites.log(tmp_path / "run") == sites.serial(FEDMRL, tmp_path / "serial", **training())
    kept = json.loads((tmp_path / "run" / "federation.json").read_text())["keys"]
    assert kept["1"] == "SHA256:new"


def test_a_node_with_the_old_key_is_let_go_and_the_site_is_waited_for(tmp_path):
    """The key is replaced first; the site starts its node with the new one only when a round has missed it."""
    link, folder = TiedLink(tmp_path), Folder()
    after(link, "1", 1, lambda: folder.now.update({"1": "SHA256:new"}))
    time = Time()
    sleep = time.sleep

    def rested(seconds):
        sleep(seconds)
        if link.shown.get(1) and 1 in link.sites:
            link.swap("1", "SHA256:new")

    time.sleep = rested
    told = Told()
    serve(
        link,
        tmp_path / "run",
        sites.federated(FEDMRL, engine={"device": "cpu", "patience": 100}, **training()),
        told,
        time,
        keys=folder.now,
        changed_keys=folder.changed,
    )
    assert any("SHA256:1, is not its own, SHA256:new" in one for one in told.notices)
    assert time.waits
    assert sites.log(tmp_path / "run") == sites.serial(FEDMRL, tmp_path / "serial", **training())


def test_a_revoked_client_is_left_out_at_once_and_the_run_goes_on_at_quorum_one(tmp_path):
    link, folder = TiedLink(tmp_path), Folder()
    after(link, "1", 1, lambda: folder.now.update({"1": ""}))
    result, told = play(tmp_path, link, folder)
    assert "client 1: its key was revoked; it is out until it has a new one" in told.notices
    assert "left out after round 1, as their keys were revoked: 1" in told.notices
    assert [link.asked(round_) for round_ in (1, 2, 3)] == [[*"012"], ["0", "2"], ["0", "2"]]
    assert any("was not taken in: client 1: its key was revoked" in one for one in told.notices)
    assert result.summary["accuracy"]["missing"]["last"] == ["1"]
    assert {one["missing"] for one in sites.log(tmp_path / "run") if "missing" in one} == {
        "its key was revoked"
    }


def test_a_key_revoked_within_a_round_does_not_end_the_run(tmp_path):
    link, folder = TiedLink(tmp_path), Folder()

    def lose(order):
        if is_training(order, "1", 2):
            folder.now["1"] = ""
            return "no answer came"
        return None

    link.lose = lose
    _, told = play(tmp_path, link, folder)
    assert "left out after round 1, as their keys were revoked: 1" in told.notices
    assert [end.round for end in told.ends] == [1, 2, 3]


def test_a_revoked_client_comes_back_with_a_new_key_and_its_state(tmp_path):
    link, folder = TiedLink(tmp_path), Folder()

    def lose(order):
        if is_evaluation(order, "1", 1):
            folder.now["1"] = ""
        if is_evaluation(order, "0", 2):
            folder.now["1"] = "SHA256:new"
            link.swap("1", "SHA256:new")

    link.lose = lose
    _, told = play(tmp_path, link, folder, rounds=4)
    assert [link.asked(round_) for round_ in (1, 2, 3, 4)] == [[*"012"], ["0", "2"], [*"012"], [*"012"]]
    assert "taken in after round 2: 1" in told.notices


def test_a_restart_knows_who_was_revoked(tmp_path):
    link, folder = TiedLink(tmp_path), Folder()

    class Killed(BaseException):
        pass

    def lose(order):
        if is_training(order, "0", 2):
            raise Killed

    link.lose = lose
    with pytest.raises(Killed):
        play(tmp_path, link, folder)
    link.lose = lambda order: None
    folder.now["1"] = folder.told["1"] = ""
    link.orders.clear()
    result, _ = play(tmp_path, link, folder)
    assert [link.asked(round_) for round_ in (2, 3)] == [["0", "2"]] * 2
    assert result.summary["accuracy"]["missing"]["last"] == ["1"]


# --- the folder of keys ---------------------------------------------------------------------------------

pytest.importorskip("cryptography")


def keys_in(tmp_path):
    from potluck.deploy.trial_keys import make_keys

    make_keys(tmp_path / "keys", ["127.0.0.1"], sites.IDS)
    make_keys(tmp_path / "others", ["127.0.0.1"], sites.IDS)
    return tmp_path / "keys" / "clients", tmp_path / "others" / "clients"


def test_a_folder_is_read_again_when_it_changes(tmp_path):
    here, there = keys_in(tmp_path)
    notices, calls = [], []
    files = KeyFolder(here, sites.IDS, notices.append, lambda: calls.append(1))
    before = files.read(begun=False)
    assert files.changed() == {}
    shutil.copy(there / "1.pub", here / "1.pub")
    after_ = files.changed()
    assert (after_["0"], after_["1"] != before["1"], calls) == (before["0"], True, [1])
    assert files.changed() == {}
    (here / "2.pub").unlink()
    assert files.changed()["2"] == ""
    (here / "0.pub").write_text("half a k")
    assert files.changed() == files.changed() == {}
    shutil.copy(here / "1.pub", here / "0.pub")
    assert files.changed() == {}
    for path in here.glob("*.pub"):
        path.unlink()
    assert files.changed() == {}  # a folder that was not mounted revokes nobody
    assert [one.partition(": ")[0] for one in notices] == ["the changed keys do not count yet"] * 3


def test_flower_hears_of_a_key_before_it_counts_and_is_told_again_where_it_refused(tmp_path):
    here, there = keys_in(tmp_path)
    notices, refusing = [], [True]

    def renewed():
        if refusing[0]:
            raise RunError("Flower does not take the key")

    files = KeyFolder(here, sites.IDS, notices.append, renewed)
    files.read(begun=False)
    shutil.copy(there / "1.pub", here / "1.pub")
    assert files.changed() == files.changed() == {}
    assert notices == ["the changed keys do not count yet: Flower does not take the key"]
    refusing[0] = False
    assert files.changed()


def foreign(make):
    """Something else that lies in the folder of keys."""

    def change(here, there):
        make(here / "other.pub")

    return change


def commented(here, there):
    line = (there / "1.pub").read_bytes().split()
    (here / "1.pub").write_bytes(b" ".join([*line[:2], b"M\xfcller"]) + b"\n")


def piped(here, there):
    (here / "1.pub").unlink()
    os.mkfifo(here / "1.pub")


def another_kind(here, there):
    """What ssh-keygen makes unasked; at the same time a key is revoked, which counts when all of it does."""
    (here / "2.pub").unlink()
    (here / "1.pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDxF north\n")


def no_point(here, there):
    (here / "1.pub").write_text("ecdsa-sha2-nistp384 AAAA broken\n")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (commented, ["supernode register /1.pub", "supernode unregister 2"]),
        (piped, "no plain file"),
        (another_kind, "1.pub is no ECDSA key, and Flower takes no other"),
        (no_point, "Flower does not take it"),
        (foreign(Path.mkdir), []),
        (foreign(os.mkfifo), []),
        (foreign(lambda path: path.write_bytes(bytes(range(256)))), []),
        (foreign(lambda path: path.write_text("ssh-rsa AAAA a foreign key\n")), []),
        (foreign(lambda path: path.symlink_to("/nowhere")), []),
        (lambda here, there: (here / "1.pub").write_text((here / "1.pub").read_text().strip() + " old"), []),
    ],
    ids=[
        "no UTF-8",
        "pipe",
        "ed25519",
        "broken",
        "foreign folder",
        "foreign pipe",
        "binary",
        "foreign key",
        "dangling",
        "comment",
    ],
)
def test_nothing_in_the_folder_of_keys_ends_the_server(tmp_path, monkeypatch, change, told):
    """`told` is what Flower hears, or what the operator does, where all earlier keys go on to count."""
    here, there = keys_in(tmp_path)
    heard, notices = [], []

    def flwr(home, log, what, *words):
        if words[1] == "register" and b"broken" in Path(words[2]).read_bytes():
            raise RunError(f"{words[2]}: Flower does not take it")
        heard.append(" ".join(words).replace(str(here), ""))
        return {"node-id": str(len(heard))}

    monkeypatch.setattr(superlinks, "flwr", flwr)
    security = Security(client_keys=here, node_keys=True)
    link = superlinks.Superlink("127.0.0.1:8000", security, tmp_path, notices.append, sites.IDS)
    link.own = object()
    link.renew_keys()
    files = KeyFolder(here, sites.IDS, notices.append, link.renew_keys)
    before = files.read(begun=False)
    heard.clear()
    change(here, there)
    after_ = files.changed()
    if isinstance(told, str):
        assert (after_, heard, files.changed()) == ({}, [], {})
        assert [("1.pub" in one, told in one) for one in notices] == [(True, True)]
    else:
        assert (heard, notices) == (told, [])
        assert {**before, **after_} == client_keys(here, sites.IDS)


def test_a_missing_key_is_an_error_at_the_first_start_alone(tmp_path):
    here, _ = keys_in(tmp_path)
    (here / "1.pub").unlink()
    files = KeyFolder(here, sites.IDS, print)
    security = Security(client_keys=here, node_keys=True)
    with pytest.raises(
        ConfigError, match=r"key of client 1, .*1\.pub, cannot be read: .*; check --client-keys"
    ):
        chosen_keys(files, security, "127.0.0.1:1")
    assert chosen_keys(files, security, "127.0.0.1:1", begun=True)["1"] == ""
    for path in here.glob("*.pub"):
        path.unlink()
    with pytest.raises(ConfigError, match="holds no key of any client"):
        chosen_keys(files, security, "127.0.0.1:1", begun=True)


def test_nobody_takes_over_a_revoked_client_or_the_old_key_of_another():
    register = KeyRegister({"a": "1", "b": ""}, changed=lambda: {"a": "2"})
    assert "its key was revoked" in register.refuse("b", "9")
    assert "is that of client a" in register.refuse("b", "1")
    assert register.renew() == ["client a: its key is 2 from now on"]
    assert register.renew() == []
    assert "is not its own, 2" in register.refuse("a", "1")
    assert register.refuse("a", "2") == ""
    assert "has shown no key" in register.wrong("a", "")


def test_flower_is_told_of_changed_keys_unless_the_superlink_is_the_operators(tmp_path, monkeypatch):
    here, there = keys_in(tmp_path)
    told, notices = [], []

    def flwr(home, log, what, *words):
        told.append(" ".join(words).replace(str(here), ""))
        return {"node-id": str(len(told))}

    monkeypatch.setattr(superlinks, "flwr", flwr)
    security = Security(client_keys=here, node_keys=True)
    link = superlinks.Superlink("127.0.0.1:8000", security, tmp_path, notices.append, sites.IDS)
    link.renew_keys()
    assert told == []
    assert "is not ours, so tell it too" in notices[0]
    link.own = object()
    link.renew_keys()
    told.clear()
    shutil.copy(there / "1.pub", here / "1.pub")
    (here / "2.pub").unlink()
    link.renew_keys()
    assert sorted(told) == [
        "supernode register /1.pub",
        "supernode unregister 2",
        "supernode unregister 3",
    ]

    def refusing(*given):
        raise RunError("Flower does not take the end of a key: it is away")

    monkeypatch.setattr(superlinks, "flwr", refusing)
    (here / "0.pub").unlink()
    link.renew_keys()  # the key is that of no client any more, whatever Flower knows
    assert "does not take the end of a key" in notices[-1]


# --- over Flower ----------------------------------------------------------------------------------------


@pytest.mark.faults
def test_keys_change_in_a_federation_of_real_processes(tmp_path):
    """One key is rotated, then one is revoked, at quorum 1 and with the server's own SuperLink."""
    pytest.importorskip("flwr")
    from federations import Federation, engine

    from potluck.deploy.trial_keys import make_keys

    with contextlib.closing(Federation(tmp_path)) as federation:
        tied = federation.tied(sites.IDS)
        keys, new = tmp_path / "keys", tmp_path / "new"
        make_keys(new, ["127.0.0.1"], ["1"])
        joins = {client: federation.join(client, *tied[client]) for client in sites.IDS}
        server = federation.serve(sites.federated(FEDMRL, **engine(patience=300), **training(5)))

        federation.wait(lambda: federation.rounds() == 1, 500)
        shutil.copy(new / "clients" / "1.pub", keys / "clients" / "1.pub")
        federation.wait(lambda: "client 1: its key is SHA256:" in federation.log("serve"))
        joins["1"].end()
        words = ("--ca", str(keys / "ca.crt"), "--node-key", str(new / "clients" / "1"))
        federation.join("1", *words)
        federation.wait(lambda: federation.rounds() >= 3, 400)
        assert "goes on without" not in federation.log("serve")

        (keys / "clients" / "2.pub").unlink()
        federation.wait(lambda: "as their keys were revoked: 2" in federation.log("serve"))
        federation.finish(server)
        assert federation.rounds() == 5
        assert federation.log("serve").count("was not taken in: client 2") == 1  # then Flower keeps it out
        measured = {one["round"]: set() for one in sites.log(federation.run)}
        for one in sites.log(federation.run):
            measured[one["round"]] |= {one["client"]} if "missing" not in one else set()
        assert measured[3] == {*sites.IDS}
        assert measured[5] == {"0", "1"}
        federation.wait(lambda: "taken off the register" in federation.log("join-2"), 200)
