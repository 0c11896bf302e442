//! A file of `src` uses its own layer and those below. `src/lib.rs` lists the layers, from the bottom to the top. The files of a
//! directory do not use each other in a circle.

use std::collections::BTreeMap;
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

/// The modules that a text names after this path: for `crate::`, `crate::name` and `crate::{name, other::Thing}`.
fn used<'a>(text: &'a str, path: &str) -> Vec<&'a str> {
    let name = |text: &str| text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    let mut found = Vec::new();
    for (at, prefix) in text.match_indices(path) {
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
        for other in used(&text, "crate::") {
            let theirs = layer(other).unwrap_or_else(|| panic!("{}: there is no {other}", path.display()));
            assert!(theirs <= own, "{} uses {other}, which is above it", path.display());
            // Within a layer modules stand beside each other.
            assert!(theirs < own || other == module, "{} uses {other}", path.display());
            uses += 1;
        }
    }
    assert!(uses > 100 && layers.len() > 8, "{uses} uses of {layers:?}");
}

/// Each file with the files that it uses.
type Uses<'a> = BTreeMap<&'a str, Vec<&'a str>>;

/// What is left of these files when files are removed that use none of the others, or that none of the others uses.
fn circles(mut files: Uses) -> Uses {
    let is_outside = |files: &Uses, name: &str| {
        files.values().all(|used| !used.contains(&name))
            || !files[name].iter().any(|used| files.contains_key(used))
    };
    while let Some(name) = files.keys().copied().find(|name| is_outside(&files, name)) {
        files.remove(name);
    }
    files
}

#[test]
fn no_files_of_a_directory_use_each_other_in_a_circle() {
    let names = ["a", "b", "c", "d"];
    let found = circles(names.into_iter().zip([vec!["b", "d"], vec!["c"], vec!["b", "d"], vec![]]).collect());
    assert_eq!(found.into_keys().collect::<Vec<_>>(), ["b", "c"]);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders: BTreeMap<PathBuf, BTreeMap<String, String>> = BTreeMap::new();
    for path in files(&source) {
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name");
        let text = fs::read_to_string(&path).expect("a file");
        // Links in comments are no uses.
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>();
        let folder = path.parent().expect("a folder").to_owned();
        folders.entry(folder).or_default().insert(name.to_owned(), code.join("\n"));
    }
    let (mut uses, mut found) = (0, Vec::new());
    for (folder, texts) in &folders {
        let inside = folder.strip_prefix(&source).expect("a folder of src");
        let own: String = inside.iter().map(|part| format!("{}::", part.to_str().expect("a name"))).collect();
        let graph: Uses = texts
            .iter()
            .filter(|(name, _)| *name != "mod" && *name != "lib")
            .map(|(name, text)| {
                let mut named = used(text, "super::");
                named.extend(used(text, &format!("crate::{own}")));
                named.retain(|other| texts.contains_key(*other) && *other != name);
                (name.as_str(), named)
            })
            .collect();
        uses += graph.values().map(Vec::len).sum::<usize>();
        let left = circles(graph);
        if !left.is_empty() {
            found.push(format!("{}: {left:?}", inside.display()));
        }
    }
    assert!(uses > 100, "{uses} uses");
    assert!(found.is_empty(), "{}", found.join("\n"));
}
