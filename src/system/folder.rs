//! Directories that only this user can access.
//!
//! They are made in places where others write too, such as the temporary directory. A link, or a directory of another user, in
//! their place is refused.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

/// The user that this process writes as.
fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Makes a directory that only this user can access, unless there is one.
pub fn make_one(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let refused = |words: String| Err(io::Error::other(format!("{} {words}", path.display())));
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() {
        return refused("is a link or not a directory; another user may have made it".into());
    }
    if found.uid() != user() {
        return refused(format!("belongs to user {}, not to user {}", found.uid(), user()));
    }
    if found.mode() & 0o077 != 0 {
        return refused(format!("is open to others (mode {:04o})", found.mode() & 0o7777));
    }
    Ok(())
}

/// The same for a directory and the directory that it is in.
pub fn make(path: &Path) -> io::Result<()> {
    if let Some(outer) = path.parent() {
        outer.parent().map_or(Ok(()), fs::create_dir_all)?;
        make_one(outer)?;
    }
    make_one(path)
}

/// Writes a file atomically, in a directory that `make` makes.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    path.parent().map_or(Ok(()), make)?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&temporary, bytes)?;
    fs::rename(temporary, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;

    fn base(name: &str) -> PathBuf {
        let base = std::env::temp_dir().join(format!("mpi4jax-folder-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&base);
        fs::create_dir_all(&base).unwrap();
        base
    }

    #[test]
    fn directories_are_private_and_files_are_written_as_a_whole() {
        let base = base("private");
        let path = base.join("user/job");
        (0..2).for_each(|_| make(&path).unwrap());
        for made in [&path, &base.join("user")] {
            assert_eq!(fs::metadata(made).unwrap().permissions().mode() & 0o777, 0o700);
        }
        fs::remove_dir(&path).unwrap(); // the report of a job that has no board is the first file there
        for bytes in ["ours", "anew"] {
            write(&path.join("a.txt"), bytes.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(path.join("a.txt")).unwrap(), bytes);
        }
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
        fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn what_others_may_have_made_is_refused_in_words() {
        let base = base("refused");
        fs::create_dir(base.join("elsewhere")).unwrap();
        symlink(base.join("elsewhere"), base.join("link")).unwrap();
        fs::create_dir(base.join("open")).unwrap();
        fs::set_permissions(base.join("open"), fs::Permissions::from_mode(0o770)).unwrap();
        for (name, words) in [("link", "is a link"), ("open", "is open to others (mode 0770)")] {
            let job = base.join(name).join("job");
            for result in [make(&job), write(&job.join("a.txt"), b"ours")] {
                let error = result.unwrap_err().to_string();
                assert!(error.contains(words), "{error}");
            }
        }
        assert_eq!(fs::read_dir(base.join("elsewhere")).unwrap().count(), 0);
        if user() == 0 {
            fs::create_dir(base.join("theirs")).unwrap();
            fs::set_permissions(base.join("theirs"), fs::Permissions::from_mode(0o700)).unwrap();
            std::os::unix::fs::chown(base.join("theirs"), Some(12345), None).unwrap();
            let error = make(&base.join("theirs/job")).unwrap_err().to_string();
            assert!(error.contains("belongs to user 12345"), "{error}");
        }
        fs::remove_dir_all(&base).unwrap();
    }
}
