"""`explainers audit`: what a model relies on in all images of a folder, and heads that rely less on it."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence

from explainers.app.audited_photos import list_folder
from explainers.app.audits import PASSES, audit_folder, open_audit, start_session
from explainers.app.command import print_error
from explainers.app.explain_command import check_writable, command_to_serve
from explainers.app.options import model_and_methods
from explainers.app.session import Session
from explainers.auditing.audit import FILES, Audit, Group
from explainers.errors import InputError
from explainers.report.audit_page import PAGE
from explainers.saved.files import printable

HEAD = "head.safetensors"
"""The repaired head in the folder of an audit."""

LOSS = 0.02
"""Fall of the accuracy above which a repair says what to do."""

SHOWN = 10
"""Suspicious groups that are printed."""

FEW = 3
"""Groups that are printed if none is suspicious, and that the next command is without."""


def audit(options: Namespace) -> None:
    """Audit a model, and print the most suspicious groups; or write a head without some, after an audit."""
    check_writable(options.output)
    if options.masks:
        list_folder(options.masks)
    model, methods = model_and_methods(options)
    session = start_session(model, methods[0], options.batch_size)
    if options.texts:
        session.text_head.embed(options.texts)  # at once, if the model has none
    if options.without is not None:
        return write_repair(session, options)
    if options.labels is None and any(entry.is_dir() for entry in options.folder.glob("[!.]*")):
        print_error(f"{options.folder}: no accuracy without labels; --labels folder takes its folders as classes")
    command = ["explainers", *sys.argv[1:]]
    masks = options.masks and (options.masks, options.mask_value)
    chosen = options.labels, options.output, masks, options.groups, options.passes or PASSES
    try:
        found = audit_folder(session, options.folder, *chosen, command)
        if options.texts:
            found.name_groups(options.texts)
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"- the same command goes on with the evidence in {options.output}")
        raise
    print_groups(found)
    page, numbers = options.output / PAGE, options.output / FILES[0]
    print(f"\n{page} shows the groups in the photos; {numbers} has all numbers")
    if found.suspicious:
        words = shlex.join([*command, "--without", *(str(group.index) for group in found.suspicious[:FEW])])
        print(f"Next: look at the page, and write a head that relies less on what is wrong, such as: {words}")


def write_repair(session: Session, options: Namespace) -> None:
    """Write a head without some groups of an audit; print what each strength of the repair costs, and what changes."""
    try:
        found = open_audit(session, options.folder, options.output)
    except InputError as error:
        typed = " ".join(map(str, options.without))
        raise InputError(f"--without {typed}: {error}; audit first, without this option", *error.settings) from error
    repaired = found.without(options.without, options.strength)
    file = repaired.save(options.output / HEAD)
    if repaired.curve:
        print("strength  reliance on the groups  same class predicted  accuracy  with the groups  without")
    for price in repaired.curve:
        shares = [price.accuracy, price.accuracy_with, price.accuracy_without]
        written = ["-" if share is None else f"{share:.1%}" for share in shares]
        chosen = "  <- chosen" * (price.strength == repaired.strength)
        row = f"{price.strength:8g}  {price.reliance:22.3f}  {price.agreement:20.1%}"
        print(f"{row}  {written[0]:>8}  {written[1]:>15}  {written[2]:>7}{chosen}")
    card = found.report_card(repaired)
    print(f"\n{card}\n")
    before, after = card.accuracy
    if before is not None and after is not None and before - after > LOSS:
        print_error(
            f"--without: the accuracy falls by {before - after:.1%} on these images, of which some may have been right"
            f" by this alone: judge it on images without the fault; --strength below {repaired.strength:g} takes less"
        )
    options.head = str(file)
    shown = shlex.join(["--audit", str(options.output)])
    print(f"{file} has the head. Next: explain images with it: {command_to_serve(options)} {shown}")


def print_groups(audit: Audit) -> None:
    """Print what was audited, and the most suspicious groups with their reasons."""
    numbers, accuracy = audit.numbers, audit.numbers["accuracy"]
    right = "" if accuracy is None else f", {accuracy:.1%} predicted right"
    print(f"{numbers['images']:,} images{right}: {audit.conclude()}{'' if audit.suspicious else '; the highest:'}\n")
    shown = audit.suspicious[:SHOWN] or audit.groups[:FEW]
    lines = [describe_group(group, audit.classes) for group in shown]
    width = max(len(name) for name, _ in lines)
    print(f"group  {'class':{width}}  suspicion  evidence  images  log-odds lost if hidden, if random patches are")
    for group, (name, of_group) in zip(shown, lines, strict=True):
        print(f"{group.index:5}  {name:{width}}  {of_group}")
        for reason in group.reasons:
            print(f"       - {printable(reason)}")
    if len(audit.suspicious) > SHOWN:
        print(f"... and {len(audit.suspicious) - SHOWN} more")


def describe_group(group: Group, classes: Sequence[str]) -> tuple[str, str]:
    """The name of its class, and its numbers in a line."""
    effects = [f"{each.mean:.2f} ± {each.error:.2f}" for each in (group.hidden, group.random) if each]
    return (
        printable(classes[group.class_index])[:30],
        f"{group.suspicion:9.2f}  {group.share:8.0%}  {group.image_share:6.0%}  {', '.join(effects) or 'not measured'}",
    )
