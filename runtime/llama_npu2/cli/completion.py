"""Scripts that complete a command line in bash or zsh, made from the table of options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import Template

from llama_npu2.options import DIRECTORY, FILE, Option

_PATHS = {FILE, DIRECTORY, "PATH", "MODEL", "KEY|DIR", "REMOTE"}
"""Names of values that may be paths."""


def script(
    shell: str, program: str, commands: Mapping[str, str], options: Mapping[str, Sequence[Option]], flags: bool
) -> str:
    """Return the script.

    Args:
        shell: `bash` or `zsh`.
        program: the command to complete.
        commands: a sentence for each of its commands; one that is not named is `run`.
        options: those that each command takes.
        flags: options are written `--name=value`, else `name=value`.
    """
    write = {"bash": _bash, "zsh": _zsh}[shell]
    every = {_word(each, flags): each for known in options.values() for each in known}
    names = {name: [_word(each, flags) for each in known] for name, known in options.items()}
    return write(program, commands, names, every)


def _word(each: Option, flags: bool) -> str:
    """Return an option up to its value."""
    if not flags:
        return f"{each.name}="
    return each.flag if each.type == "bool" else f"{each.flag}="


def _values(each: Option) -> list[str]:
    return ["1"] if each.type == "bool" else [*each.choices, *each.examples]


def _cases(every: Mapping[str, Option], line: str, path: str) -> str:
    """Return the lines of a `case` by the name of an option."""
    lines = []
    for word, each in every.items():
        if word[-1] != "=":
            continue
        parts = [line.format(" ".join(map(_quoted, values)))] if (values := _values(each)) else []
        parts += [path] if each.metavar in _PATHS else []
        if parts:
            lines.append(f"        {word.removesuffix('=')}) {'; '.join(parts)} ;;")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_BASH = Template("""\
# Completion of $program in bash: put into ~/.bashrc as
#   source <(${how}bash)
_$function() {
    local line="$${COMP_LINE:0:COMP_POINT}" command=run name value word words wanted=
    local -a candidates=() names=()
    # bash splits at "=" and ":", options do not.
    read -r -a words <<< "$$line"
    [[ $$line == *[[:space:]] ]] && words+=("")
    local current="$${words[-1]}"
    for word in "$${words[@]:1:$${#words[@]}-2}"; do
        case $$word in $alternatives) command=$$word; break ;; esac
    done
    if [[ $$current == *=* ]]; then
        name=$${current%%=*} value=$${current#*=}
        case $$name in
$values
        esac
        while IFS= read -r word; do names+=("$$word"); done \\
            < <(compgen -W "$${candidates[*]}" -- "$$value"; [[ $$wanted ]] && compgen -f -- "$$value")
        if [[ $$COMP_WORDBREAKS != *=* ]]; then
            names=("$${names[@]/#/$$name=}")
        elif [[ $$COMP_WORDBREAKS == *:* && $$value == *:* ]]; then
            names=("$${names[@]#"$${value%"$${value##*:}"}"}")
        fi
        compopt -o filenames 2> /dev/null
        COMPREPLY=("$${names[@]}")
        return
    fi
    case $$command in
$options
    esac
    (($${#words[@]} == 2)) && candidates+=($commands)
    while IFS= read -r word; do names+=("$$word"); done < <(compgen -W "$${candidates[*]}" -- "$$current"$more)
    [[ $${#names[@]} == 1 && $${names[0]} == *= ]] && compopt -o nospace 2> /dev/null
    COMPREPLY=("$${names[@]}")
}
complete -F _$function $program
""")


def _bash(
    program: str, commands: Mapping[str, str], names: Mapping[str, Sequence[str]], every: Mapping[str, Option]
) -> str:
    options = (f"        {name}) candidates=({' '.join(words)}) ;;" for name, words in names.items())
    return _filled(
        _BASH,
        program,
        commands,
        values=_cases(every, "candidates=({})", "wanted=1"),
        options="\n".join(options),
        commands=" ".join(commands),
        more="" if program == "doit" else '; compgen -f -- "$current"',
    )


_ZSH = Template("""\
#compdef $program
# Completion of $program in zsh: put into ~/.zshrc, after compinit, as
#   source <(${how}zsh)
_$function() {
    local command=run name word
    local -a options flags commands
    for word in "$${(@)words[2,CURRENT-1]}"; do
        case $$word in ($alternatives) command=$$word; break ;; esac
    done
    if [[ $$PREFIX == *=* ]]; then
        name=$${PREFIX%%=*}
        compset -P '*='
        case $$name in
$values
        esac
        return
    fi
    case $$command in
$options
    esac
    commands=(
$commands
    )
    _describe -t options option options -S ''
    _describe -t flags option flags
    ((CURRENT == 2)) && _describe -t commands command commands
    $more
}
compdef _$function $program
""")


def _zsh(
    program: str, commands: Mapping[str, str], names: Mapping[str, Sequence[str]], every: Mapping[str, Option]
) -> str:
    def described(words: Iterable[str]) -> str:
        return " ".join(_quoted(f"{word}:{every[word].help}") for word in words)

    options = (
        f"        {name}) options=({described(word for word in words if word[-1] == '=')})"
        f" flags=({described(word for word in words if word[-1] != '=')}) ;;"
        for name, words in names.items()
    )
    return _filled(
        _ZSH,
        program,
        commands,
        values=_cases(every, "compadd -- {}", "_files"),
        options="\n".join(options),
        commands="\n".join(f"        {_quoted(f'{name}:{sentence}')}" for name, sentence in commands.items()),
        more=":" if program == "doit" else "_files",
    )


def _filled(template: Template, program: str, known: Iterable[str], **parts: str) -> str:
    how = "doit completion shell=" if program == "doit" else f"{program} completion "
    function = f"llama_npu2_{program}".replace("-", "_")
    return template.substitute(program=program, how=how, function=function, alternatives="|".join(known), **parts)
