#!/usr/bin/env bash
# Unpacks Debian's python3.11 for arm64, with the libraries that it and NumPy need, into a folder. Nothing is
# installed. FOLDER/python runs it under qemu-aarch64 (Debian: qemu-user).
#     wheels/arm64_python.sh FOLDER
set -euo pipefail
folder=$(realpath -m "$1")
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state"/{lists,debs}/partial
touch "$state/status"
options=(-qq -y -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root
  -o Dir::State="$state" -o Dir::State::status="$state/status" -o Dir::State::lists="$state/lists"
  -o Dir::Cache::archives="$state/debs" -o Acquire::Languages=none)
apt-get "${options[@]}" update
apt-get "${options[@]}" --no-install-recommends --download-only install python3.11 zlib1g libstdc++6
for package in "$state"/debs/*.deb; do dpkg-deb --extract "$package" "$folder"; done
# Python starts ranks as processes of the program that it was started by: this one, also under qemu.
cat > "$folder/python" <<END
#!/bin/sh
PYTHONHOME=$folder/usr exec qemu-aarch64 -L $folder -0 "\$0" $folder/usr/bin/python3.11 "\$@"
END
chmod +x "$folder/python"
