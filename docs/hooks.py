"""What the site needs beyond mkdocs.yml: README as its home, pages for linked files outside docs/, our docstrings."""

import importlib
import inspect
import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Add README and its like, and a page for each file or folder of the repository that some page links to."""
    for source, page in PAGES.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    wanted = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while wanted:
        uri, text = wanted.pop()
        for _, link, _ in LINK.findall(text):
            page = site_page(uri, link)
            if page.startswith("source/") and page not in files.src_uris:
                content = source_page(page.removeprefix("source/").removesuffix(".md"))
                files.append(File.generated(config, page, content=content))
                wanted.append((page, content))
    return files


def on_page_markdown(markdown, page, **_):
    """Let links into the repository, as GitHub follows them, lead to the site's pages."""
    uri = page.file.src_uri

    def moved(match):
        start, link, anchor = match.groups()
        return f"{start}{posixpath.relpath(site_page(uri, link), posixpath.dirname(uri) or '.')}{anchor or ''})"

    return re.sub(r"(?m)^::: ([\w.]+)\n    options: \{", with_members, LINK.sub(moved, markdown))


def with_members(match):
    """The head of a package's list, with the names that the package exports, if it lists them for `lazily`."""
    names = getattr(importlib.import_module(match[1]), "__all__", None)
    return match[0] + (f"members: [{', '.join(names)}], " if names else "")


def site_page(uri, link):
    """Where the site has what the page `uri` links to."""
    if uri.startswith("source/"):  # written below, in the site's own terms
        return posixpath.normpath(posixpath.join(posixpath.dirname(uri), link))
    written = {page: source for source, page in PAGES.items()}.get(uri, f"docs/{uri}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(written), link))
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}.md"


def source_page(path):
    """A file with its lines, or a folder with its files, as a page that the search leaves out."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    source = ROOT / path
    if source.is_dir():
        names = sorted(p.name for p in source.iterdir() if p.is_file())
        return head + "\n".join(f"- [{name}]({posixpath.basename(path)}/{name}.md)" for name in names)
    language = {".py": "python", ".yaml": "yaml", ".json": "json"}.get(source.suffix, "text")
    return f"{head}````{language}\n{source.read_text()}\n````\n" if source.is_file() else head


def named(term):
    """The line of one setting or several, `a (…), b (…)` or `a, b (…)`, with their names as code."""
    return re.sub(r"(^|, )(\w+)(?= \(`|, \w+ \(`)" if "(" in term else r"(^|, )(\w+)", r"\1`\2`", term)


class HouseStyle(griffe.Extension):
    """Read what griffe does not know: [`Name`] as Hugging Face links, and a configuration's settings."""

    def on_module_members(self, *, mod, **_):
        """Export what a package lists for `lazily`, or else what is ours of what it imports."""
        if mod.is_init_module:
            package = importlib.import_module(mod.path)
            ours = [name for name, it in vars(package).items() if getattr(it, "__module__", "").startswith("trl_ext")]
            mod.exports = getattr(package, "__all__", ours)

    def on_object(self, *, obj, **_):
        if obj.docstring is None:
            return
        if obj.is_class and "documented" in (str(decorator.value) for decorator in obj.decorators):
            imported = getattr(importlib.import_module(obj.module.path), obj.name)
            obj.docstring.value = inspect.getdoc(imported)  # which lists the settings
        text = re.sub(r"\[`(?:~[\w.]*\.)?([\w.]+)`\](?!\()", r"`\1`", obj.docstring.value).replace(
            "[!NOTE]", "**Note**  "
        )
        obj.docstring.value = re.sub(r"(?m)^(?:Parameters|Args):\n((?:    .*\n?|\n)+)", definitions, text)


def definitions(section):
    """Settings with types in Hugging Face's words, as a definition list; what griffe can read stays."""
    if "(`" not in section[1]:
        return section[0]
    text = re.sub(r"(?m)^    ", "", section[1])
    text = re.sub(r"(?m)^> (.*)$", r"**\1**", text)
    return "\n" + re.sub(r"(?m)^(\w.*):\n    ", lambda term: f"\n{named(term[1])}\n:   ", text)
