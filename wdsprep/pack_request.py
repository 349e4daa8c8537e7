"""How the options of `wdsprep pack` become a library call."""

from functools import partial
from typing import Any

from wdsprep.buckets import parse_buckets
from wdsprep.errors import UsageError
from wdsprep.fetch import FetchRules
from wdsprep.filters import Filter
from wdsprep.images import Recode
from wdsprep.judging import Digest, Rules
from wdsprep.limits import MAX_DOWNLOAD_NBYTES, MAX_NBYTES
from wdsprep.pack import Listener, pack
from wdsprep.pack_crew import Crew, find_hands
from wdsprep.run import Outcome
from wdsprep.runners import Runner, make_runner
from wdsprep.sources import Columns


def pack_request(source: str, images: str, listener: Listener, **options: Any) -> Outcome:
    """Call `pack` as the command line asks."""
    _check(options)
    kind, address = options["runner"], options["ray_address"]
    least, most = options["workers"], options["max_workers"]

    def runner(crew: Crew) -> Runner:
        return make_runner(
            kind,
            workers=min(least, crew.workers) if most else crew.workers,
            max_workers=crew.workers if most else 0,
            units_per_worker=crew.slices,
            max_attempts=options["max_attempts"],
            address=address,
            cpus_per_worker=crew.cpus,
            name="pack",
        )

    condition = Filter(options["condition"]) if options["condition"] else None
    return pack(
        source,
        images,
        rules=_rules(options, condition),
        columns=_columns(options, condition),
        find_hands=partial(find_hands, kind, workers=most or least, address=address),
        make_runner=runner,
        fetch=_fetch_rules(options),
        limit=options["limit"] or 0,
        append=options["append"],
        overwrite=options["overwrite"],
        retry_rejected=options["retry_rejected"],
        listener=listener,
    )


def _check(options: dict[str, Any]) -> None:
    """Refuse options that contradict each other."""
    if options["append"] and options["overwrite"]:
        raise UsageError("--append keeps what is packed, --overwrite removes it: give one of them")
    if options["retry_rejected"] and options["overwrite"]:
        raise UsageError("--overwrite removes the rejects that --retry-rejected is for: give one")
    if 0 < options["max_caption"] < options["min_caption"]:
        raise UsageError("--max-caption is below --min-caption: no caption fits both")
    if options["max_side"] and not options["reencode"]:
        raise UsageError("--max-side needs --reencode: a smaller image is a new image")


def _rules(options: dict[str, Any], condition: Filter | None) -> Rules:
    recode = options["reencode"] and Recode(
        quality=options["reencode"], max_side=options["max_side"]
    )
    verify = options["verify_hash"]
    same = ("samples_per_shard", "min_size", "max_area", "max_aspect_ratio")
    return Rules(
        buckets=parse_buckets(options["buckets"]),
        max_shard_nbytes=options["max_shard_size"],
        max_nbytes=options["max_bytes"] or MAX_NBYTES,
        full_check=options["check"] == "full",
        min_caption=options["min_caption"],
        max_caption=options["max_caption"],
        filter=condition,
        recode=recode or None,
        kept=options["save_additional_columns"],
        verify=Digest(column=verify[0], hash=verify[1]) if verify else None,
        compute_hash=options["compute_hash"] or "",
        **{name: options[name] for name in same},
    )


def _columns(options: dict[str, Any], condition: Filter | None) -> Columns:
    return Columns(
        image=options["image_col"],
        caption=options["caption_col"],
        url=options["url_col"],
        digest=options["verify_hash"][0] if options["verify_hash"] else "",
        filtered=tuple(sorted(condition.names - {"caption"})) if condition else (),
        kept=options["save_additional_columns"] or (),
    )


def _fetch_rules(options: dict[str, Any]) -> FetchRules:
    return FetchRules(
        timeout_s=options["timeout"],
        retries=options["retries"],
        in_flight=options["requests"],
        per_host=options["per_host"],
        max_nbytes=options["max_bytes"] or MAX_DOWNLOAD_NBYTES,
        contact=options["contact"],
        robots=not options["ignore_robots"],
        opt_outs=not options["ignore_opt_outs"],
        allow_private=options["allow_private_hosts"],
        allow_s3=options["allow_s3"],
        minds_outage=not options["ignore_outage"],
    )
