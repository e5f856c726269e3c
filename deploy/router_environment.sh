#!/bin/sh
# Makes an environment of its own for a router, apart from the engine's, whose dependencies it must not move:
#     deploy/router_environment.sh FOLDER [sglang-router|smg]
# sglang-router is SGLang's router; smg is what it is developed on as. docs/deploy.md says what each passes on.
set -eu
folder=${1:?usage: router_environment.sh FOLDER [sglang-router|smg]}
case ${2:-sglang-router} in
    sglang-router) package="sglang-router==0.3.2" ;;
    smg) package="smg==1.13.0" ;;
    *) echo "router_environment.sh: router is '$2'; allowed: sglang-router, smg" >&2; exit 2 ;;
esac
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet "$package"
"$folder/bin/pip" list 2>/dev/null | grep -E '^(sglang-router|smg) '
