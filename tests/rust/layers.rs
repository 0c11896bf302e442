//! A file of `src` uses its own layer and those below. `src/lib.rs` lists the layers, from the bottom to the top.

use std::fs;
use std::path::{Path, PathBuf};

/// Modules by layer: a group of lines is one layer.
fn layers(list: &str) -> Vec<Vec<&str>> {
    let groups = list.split("\n\n").map(|group| group.lines().filter_map(module).collect::<Vec<_>>());
    groups.filter(|group| !group.is_empty()).collect()
}

fn module(line: &str) -> Option<&str> {
    line.split_once("mod ")?.1.strip_suffix(';')
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path());
    let of = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    entries.flat_map(of).filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// The modules at the top that a text names: `crate::name` and `crate::{name, other::Thing}`.
fn used(text: &str) -> Vec<&str> {
    let name = |text: &str| text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    let mut found = Vec::new();
    for (at, prefix) in text.match_indices("crate::") {
        let rest = &text[at + prefix.len()..];
        let Some(list) = rest.strip_prefix('{') else {
            found.push(&rest[..name(rest)]);
            continue;
        };
        let (mut depth, mut is_start) = (0, true);
        for (i, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => is_start = true,
                c if is_start && !c.is_whitespace() => {
                    found.push(&list[i..i + name(&list[i..])]);
                    is_start = false;
                }
                _ => {}
            }
        }
    }
    found
}

#[test]
fn no_file_uses_a_layer_above_its_own() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let list = fs::read_to_string(folder.join("lib.rs")).expect("the list");
    let layers = layers(&list);
    let layer = |module: &str| layers.iter().position(|layer| layer.contains(&module));
    let mut uses = 0;
    for path in files(&folder) {
        let module = path.strip_prefix(&folder).expect("a file of src").with_extension("");
        let module = module.iter().next().and_then(|name| name.to_str()).expect("a name");
        if module == "lib" {
            continue;
        }
        let own = layer(module).unwrap_or_else(|| panic!("{module} is in no layer"));
        let text = fs::read_to_string(&path).expect("a file");
        for other in used(&text) {
            let theirs = layer(other).unwrap_or_else(|| panic!("{}: there is no {other}", path.display()));
            assert!(theirs <= own, "{} uses {other}, which is above it", path.display());
            // Within a layer modules stand beside each other.
            assert!(theirs < own || other == module, "{} uses {other}", path.display());
            uses += 1;
        }
    }
    assert!(uses > 100 && layers.len() > 8, "{uses} uses of {layers:?}");
}
