//! Files that others may see coming: somebody else may have put a link, a pipe or a file of his own in their place.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// The user that this process writes as.
pub fn user() -> u32 {
    // SAFETY: takes nothing.
    unsafe { libc::geteuid() }
}

/// An empty file of this user's, in place of what there was of his. No link is followed, no other file is touched.
pub fn create(path: &Path) -> io::Result<File> {
    let named = |words: &str| io::Error::other(format!("{} {words}", path.display()));
    let mut options = OpenOptions::new();
    // A pipe would otherwise wait for a reader.
    options.write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => named("is a link, and is not followed: somebody else may have made it"),
        _ => error,
    })?;
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != user() || found.nlink() != 1 {
        return Err(named("is not a file of this user's alone, and is not written to"));
    }
    file.set_len(0)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_others_may_have_put_there_is_not_written_to() {
        let base = std::env::temp_dir().join(format!("mpi4jax-files-{}", std::process::id()));
        fs::create_dir_all(&base).unwrap();
        let [victim, link, hard, pipe, own] = ["victim", "link", "hard", "pipe", "own"].map(|n| base.join(n));
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        fs::hard_link(&victim, &hard).unwrap();
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: a path that ends.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        for path in [&link, &hard, &pipe] {
            assert!(create(path).is_err(), "{path:?}");
        }
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        fs::write(&own, "old").unwrap();
        assert_eq!(create(&own).unwrap().metadata().unwrap().len(), 0);
        fs::remove_dir_all(&base).unwrap();
    }
}
