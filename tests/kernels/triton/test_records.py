"""Tuning results on disk: found, refused with a reason, merged, exported and imported."""

import dataclasses
import json
import os
import stat
import threading

import pytest

from opkit.errors import ArgumentError
from opkit.kernels.tuning import record_format, records
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity, Record, Tried, TuningEntry, bucket_of, distance

RMS = Identity("demo::rms_norm", "_fwd", "abc")
SMALL, LARGE, SKIPPED = (Config({"BLOCK": block}, {"num_warps": 4}) for block in (64, 256, 4096))
CONFIGS = [SMALL, LARGE, SKIPPED]
DEVICE, BUCKET = "NVIDIA H200", "bf16 | d=1024"
TRIED = [
    Tried(SMALL.to_json(), 0.5),
    Tried(LARGE.to_json(), 0.25),
    Tried(SKIPPED.to_json(), None, "out of resources: shared memory"),
]


@pytest.fixture(autouse=True)
def place(tmp_path, settings):
    settings(cache_dir=tmp_path / "cache")
    return tmp_path / "cache" / "triton_tuning"


def remember(identity=RMS, device=DEVICE, bucket=BUCKET, tried=TRIED):
    return records.remember(identity, device, bucket, tried)


def lookup(identity=RMS, configs=CONFIGS, device=DEVICE, bucket=BUCKET, folders=()):
    return records.lookup(identity, configs, device, bucket, folders)


def reasons(found):
    assert found.config is None
    return [each.reason for each in found.refusals]


def test_nothing_is_recorded():
    assert lookup() == records.Lookup()
    assert records.listed() == []


def test_the_fastest_is_found(place):
    remember()
    found = lookup()
    assert found.config is LARGE
    assert [each.ms for each in found.entry.tried] == [0.25, 0.5, None]
    assert found.entry.tried[2].skipped == "out of resources: shared memory"
    assert lookup(device="NVIDIA B200") == lookup(bucket="bf16 | d=2048") == records.Lookup()
    assert lookup(Identity("demo::rms_norm", "_bwd", "abc")) == records.Lookup()


def test_files_and_folders_are_this_users_alone(place):
    remember()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (place, *place.iterdir())}
    assert modes.pop("triton_tuning") == 0o700
    (file,) = place.glob("*.json")
    assert modes[file.name] == 0o600
    assert file == records.file_of("demo::rms_norm", "_fwd")
    assert file.name.startswith("demo.rms_norm._fwd.")


def test_names_of_files_do_not_clash():
    pairs = [("a::b", "c"), ("a::b.c", ""), ("a::b", ".c"), ("a:.b", "c"), ("a::" + "b" * 300, "c")]
    files = {records.file_of(*pair) for pair in pairs}
    assert len(files) == len(pairs)
    assert all(len(file.name) < 160 for file in files)


def test_what_a_file_holds(place):
    remember()
    content = json.loads(records.file_of("demo::rms_norm", "_fwd").read_text())
    (record,) = content["records"]
    (entry,) = record["entries"]
    assert (content["format"], record["operator"], record["kernel"]) == (1, "demo::rms_norm", "_fwd")
    assert entry["config"] == {"constexprs": {"BLOCK": 256}, "options": {"num_warps": 4}}
    assert (entry["device"], entry["bucket"], entry["hash"]) == (DEVICE, BUCKET, "abc")
    assert entry["triton"] == records.triton_version()
    assert entry["tried"][2]["skipped"] == "out of resources: shared memory"


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_another_kernel_hash_is_refused():
    remember()
    assert reasons(lookup(dataclasses.replace(RMS, hash="new"))) == ["it was made for the kernel before it changed"]


def test_another_triton_is_refused(monkeypatch):
    remember()
    monkeypatch.setattr(records, "triton_version", lambda: "99.0")
    (reason,) = reasons(lookup())
    assert reason.startswith("it was made with Triton 3.")
    assert reason.endswith("and this is 99.0")


def test_a_config_that_was_not_tried_is_refused():
    remember()
    assert reasons(lookup(configs=[*CONFIGS, Config({"BLOCK": 7})])) == ["BLOCK=7 was not tried when it was made"]


def test_a_config_that_is_gone_leaves_the_next():
    remember()
    assert lookup(configs=[SKIPPED, SMALL]).config is SMALL
    assert reasons(lookup(configs=[SKIPPED])) == ["all that the kernel may use was skipped when it was made"]


def damage(file, how):
    text = file.read_text()
    file.write_bytes(how(text).encode() if isinstance(how(text), str) else how(text))


def test_a_damaged_file_is_refused_and_written_anew():
    for how, reason in (
        (lambda text: "", "cannot be read as JSON"),
        (lambda text: text[:-40], "cannot be read as JSON"),
        (lambda text: b"\xff\xfe\x00", "cannot be read as JSON"),
        (lambda text: "[" * 100000, "cannot be read as JSON"),
        (lambda text: "[]", "the file is [], expected an object"),
        (lambda text: "{}", "the file has no 'format'"),
        (lambda text: '{"format": 2, "records": 5}', "format is 2, and this opkit reads 1"),
        (lambda text: '{"format": 1, "records": 5}', "the file.records is 5, expected a list"),
        (lambda text: text.replace("demo::rms_norm", "rms_norm"), "records[0].operator is 'rms_norm'"),
        (lambda text: text.replace('"abc"', "17"), "records[0].entries[0].hash is 17, expected a string"),
        (lambda text: text.replace("0.25", "NaN"), "ms is nan, expected a time in milliseconds"),
        (lambda text: text.replace("0.25", "-1"), "ms is -1, expected a time in milliseconds"),
        (lambda text: text.replace("0.25", '"fast"'), "records[0].entries[0].tried[0].ms is 'fast', expected a number"),
        (lambda text: text.replace("0.25", "true"), "ms is True, expected a number"),
        (lambda text: text.replace("0.25", "0.75"), "(BLOCK=256, num_warps=4) is not the fastest"),
        (lambda text: text.replace("+00:00", "Q"), "date is"),
        (lambda text: text.replace("+00:00", ""), "expected a date such as"),
        (lambda text: text.replace('"constexprs"', '"values"'), "config has no 'constexprs'"),
        (lambda text: text.replace('"BLOCK": 64', '"BLOCK": {"a": 1}'), "BLOCK is {'a': 1}, expected a value"),
        (lambda text: text.replace('"BLOCK": 64', '"BLOCK": 256'), "has a configuration twice"),
    ):
        remember()
        file = records.file_of("demo::rms_norm", "_fwd")
        damage(file, how)
        refusals = lookup().refusals
        assert [(refusal.damaged, refusal.file) for refusal in refusals] == [(True, file)], reason
        assert reason in str(refusals[0])
        assert records.listed() == [], reason
        remember()
        assert lookup().config is LARGE, reason


def test_a_folder_in_the_place_of_a_file(place):
    records.file_of("demo::rms_norm", "_fwd").mkdir(parents=True)
    assert reasons(lookup()) == ["it cannot be read: Is a directory"]
    assert records.listed() == []


# ---- packages --------------------------------------------------------------------------------------------------------


def test_a_package_has_results(tmp_path, place):
    remember()
    records.export_all(tmp_path / "pkg" / "_opkit" / "tuning" / "h200.json")
    for file in place.glob("*.json"):
        file.unlink()
    folders = (tmp_path / "no such", tmp_path / "pkg" / "_opkit" / "tuning")
    assert lookup(folders=folders).config is LARGE
    (refusal,) = lookup(dataclasses.replace(RMS, hash="new"), folders=folders).refusals
    assert refusal.file.name == "h200.json"


def test_the_cache_goes_before_a_package(tmp_path):
    remember()
    records.export_all(tmp_path / "shipped" / "h200.json")
    remember(tried=[Tried(SMALL.to_json(), 0.125)])
    assert lookup(folders=[tmp_path / "shipped"]).config is SMALL


def test_the_folders_of_a_package():
    assert [path.parts[-2:] for path in records.packaged("opkit.kernels.cc.scanner")] == [("_opkit", "tuning")] * 3
    assert records.packaged("no.such.module") == ()


def test_the_nearest_bucket(place):
    for size, chosen in ((64, SMALL), (8192, LARGE)):
        remember(bucket=bucket_of({"d": size}, ["bf16"]), tried=[Tried(chosen.to_json(), 1.0)])
    for size, chosen in ((128, SMALL), (4096, LARGE)):
        assert records.nearest(RMS, [chosen], DEVICE, bucket_of({"d": size}, ["bf16"])).config is chosen
    both = [Tried(SMALL.to_json(), 1.0), Tried(LARGE.to_json(), 2.0)]
    remember(bucket="fp32 | d=256", tried=both)
    assert records.nearest(RMS, [LARGE, SMALL], DEVICE, "bf16 | d=256").config is SMALL
    assert records.nearest(RMS, [LARGE, SMALL], DEVICE, "bf16 | m=256") == records.Lookup()
    assert records.nearest(RMS, [LARGE, SMALL], "NVIDIA B200", "bf16 | d=256") == records.Lookup()
    assert records.nearest(dataclasses.replace(RMS, hash="x"), [SMALL], DEVICE, "bf16 | d=64") == records.Lookup()


def test_buckets():
    assert bucket_of({"b": 17, "a": 16, "c": 0, "e": 1025}, ["fp32", "i64"]) == "fp32 i64 | a=16 b=32 c=0 e=2048"
    assert bucket_of({}, []) == " | "
    assert distance("bf16 | a=1 b=8", "bf16 | a=4 b=4") == 3
    assert 100 < distance("bf16 | a=1", "fp32 | a=1") < float("inf")
    assert distance(" | ", " | ") == 0


# ---- merging ---------------------------------------------------------------------------------------------------------


def entry(date, **changes):
    fields = {"device": DEVICE, "bucket": BUCKET, "hash": "abc", "triton": "3.6", "tried": tuple(TRIED[:1])}
    return TuningEntry(**{**fields, "date": f"2026-01-{date:02}T00:00:00+00:00", **changes})


def test_the_newer_entry_is_kept_with_what_the_older_alone_tried():
    older, newer = entry(1, tried=tuple(TRIED[:2])), entry(2, tried=(Tried(SMALL.to_json(), 0.125),))
    for both in ((older, newer), (newer, older)):
        merged = record_format.merged(*both)
        assert merged.date == newer.date
        assert [(each.label, each.ms) for each in merged.tried] == [
            ("BLOCK=64, num_warps=4", 0.125),
            ("BLOCK=256, num_warps=4", 0.25),
        ]


def test_entries_of_different_kernels_do_not_mix():
    older, newer = entry(1), entry(2, hash="new", tried=(Tried(LARGE.to_json(), 1.0),))
    assert record_format.merged(newer, older) == newer


def test_threads_that_write_at_once_lose_nothing():
    def work(number):
        remember(bucket=f"bf16 | d={number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    (record,) = records.listed()
    assert len(record.entries) == 16


# ---- from machine to machine -----------------------------------------------------------------------------------------


def test_export_and_import(tmp_path, settings):
    remember()
    remember(bucket="bf16 | d=64")
    remember(Identity("demo::softmax", "_softmax", "def"))
    assert records.export_all(tmp_path / "all.json") == 3
    assert records.export_all(tmp_path / "sub" / "some.json", ["demo::softmax"]) == 1
    assert stat.S_IMODE((tmp_path / "all.json").stat().st_mode) == 0o644
    before = records.listed()
    settings(cache_dir=tmp_path / "elsewhere")
    assert records.listed() == []
    assert records.import_from(tmp_path / "all.json") == 3
    assert records.listed() == before
    assert lookup().config is LARGE


def test_import_keeps_what_is_newer(tmp_path):
    remember()
    older = Record("demo::rms_norm", "_fwd", (entry(1, tried=(Tried(SMALL.to_json(), 0.001),)),))
    (tmp_path / "old.json").write_text(record_format.render([older]))
    assert records.import_from(tmp_path / "old.json") == 1
    assert lookup().config is LARGE


def test_import_refuses_garbage_whole(tmp_path):
    good, bad = (
        Record("demo::a", "a", (entry(1),)),
        Record("demo::b", "b", (dataclasses.replace(entry(1), date="yesterday"),)),
    )
    path = tmp_path / "mixed.json"
    path.write_text(record_format.render([good, bad]))
    with pytest.raises(ArgumentError, match=r"mixed\.json is no file of tuning results: records\[1\].*date is 'yester"):
        records.import_from(path)
    assert records.listed() == []


def test_import_says_what_cannot_be_read(tmp_path):
    with pytest.raises(ArgumentError, match=r"none\.json cannot be read: No such file"):
        records.import_from(tmp_path / "none.json")


def test_export_says_what_it_cannot_do(tmp_path):
    with pytest.raises(ArgumentError, match=r"There are no tuning results in .*Tune first"):
        records.export_all(tmp_path / "all.json")
    remember()
    with pytest.raises(ArgumentError, match="no tuning results of demo::other"):
        records.export_all(tmp_path / "all.json", ["demo::other"])
    (tmp_path / "taken").write_text("")
    with pytest.raises(ArgumentError, match=r"taken/all\.json cannot be written: "):
        records.export_all(tmp_path / "taken" / "all.json")
    assert sorted(os.listdir(tmp_path)) == ["cache", "taken"]  # and no temporary file


def test_import_into_a_cache_that_cannot_be_written(tmp_path, place):
    remember()
    records.export_all(tmp_path / "all.json")
    for path in [*place.glob("*/*"), *place.glob("*.json")]:
        path.unlink()
    (place / "locks").rmdir()
    place.rmdir()
    place.write_text("")
    with pytest.raises(ArgumentError, match="triton_tuning cannot be written to"):
        records.import_from(tmp_path / "all.json")
