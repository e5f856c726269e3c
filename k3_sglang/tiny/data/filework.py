"""Short errands with the agent's file tools: what is here, where is a name, what does a function do, write a note."""

from __future__ import annotations

from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.project import project
from k3_sglang.tiny.data.sample import Call, Talk
from k3_sglang.tiny.data.session import Session, begin


def file_work(draw: Draw) -> Talk:
    """One or two errands in one project."""
    session = begin(draw, project(draw, bugs=0), "files")
    for _ in range(draw.pick((1, 2))):
        errand(session)
    return session.talk


def errand(session: Session) -> None:
    """A user turn that takes one call of a declared tool."""
    names = {tool["function"]["name"] for tool in session.talk.tools}
    errands = [_list, _describe]
    errands += [_search] * 2 if "search_files" in names else []
    errands += [_write] * 2 if "write_file" in names else []
    session.draw.pick(errands)(session)


def _list(session: Session) -> None:
    talk, space = session.talk, session.space
    talk.user(session.draw.pick(("Which files are here?", "List the files.", "What is in this project?")))
    listing = space.list_files()
    talk.call(Call("list_files", {}, listing), think="List the files.")
    names = [line.split("  ")[0] for line in listing.splitlines()]
    talk.answer(f"The files are {', '.join(names)}.", think="The list says it.")


def _search(session: Session) -> None:
    draw, talk = session.draw, session.talk
    name = draw.pick(session.project.functions).name
    talk.user(draw.pick(("Where is {} used?", "Search for {}.", "Which files contain {}?")).format(name))
    found = session.space.search_files(name)
    talk.call(Call("search_files", {"text": name}, found), think=f"Search {name}.")
    files = sorted({line.split(":")[0] for line in found.splitlines()[:-1]})
    talk.answer(f"{name} is in {' and '.join(files)}.", think=f"Found in {' and '.join(files)}.")


def _describe(session: Session) -> None:
    draw, talk, made = session.draw, session.talk, session.project
    function = draw.pick(made.functions)
    asks = ("What does {} in {} do?", "Look at {} in {}: what does it do?")
    talk.user(draw.pick(asks).format(function.name, made.source_file))
    session.read(made.source_file, think=f"Read {made.source_file}.")
    talk.answer(f"{function.name}({function.signature}): {function.purpose}", think="The docstring says it.")


def _write(session: Session) -> None:
    draw, talk = session.draw, session.talk
    path = f"{draw.name()}.{draw.pick(('txt', 'md'))}"
    text = f"{draw.name()} {draw.number()}" if draw.chance(0.5) else draw.code()
    talk.user(
        draw.pick(("Write {1} to {0}.", "Create {0} with the text {1}.", "Put {1} into a file {0}.")).format(path, text)
    )
    call = Call("write_file", {"path": path, "content": text}, session.space.write_file(path, text))
    talk.call(call, think=f"Write {path}.")
    talk.answer(f"I wrote {path}.", think="Done.")
