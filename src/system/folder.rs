//! A folder that this user alone can look into.
//!
//! It is made in a place where others write too, such as the temporary directory: what they may have put in its
//! place is refused, and no link is followed. What is in it is reached through the folder itself, not by its
//! path, so that it cannot be exchanged later.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, mkdirat, openat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::path::Arg;

/// The user that this process writes as.
fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[derive(Debug)]
pub struct Folder {
    pub path: PathBuf,
    own: File,
}

fn open(folder: &File, name: impl Arg, flags: OFlags) -> Result<File, Errno> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    openat(folder, name, flags, Mode::RUSR | Mode::WUSR).map(File::from)
}

/// Opens a folder of this user's alone, which is made unless it is there.
fn enter(parent: &File, name: &OsStr, path: &Path) -> io::Result<File> {
    match mkdirat(parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let refused = |words: String| io::Error::other(format!("{} {words}", path.display()));
    let file = open(parent, name, OFlags::RDONLY | OFlags::DIRECTORY).map_err(|error| match error {
        Errno::NOTDIR | Errno::LOOP => {
            refused("is a link or not a directory; another user may have made it".into())
        }
        _ => error.into(),
    })?;
    let found = file.metadata()?;
    if found.uid() != user() {
        return Err(refused(format!("belongs to user {}, not to user {}", found.uid(), user())));
    }
    if found.mode() & 0o077 != 0 {
        return Err(refused(format!("is open to others (mode {:04o})", found.mode() & 0o7777)));
    }
    Ok(file)
}

impl Folder {
    /// Opens a directory of this user's alone, and makes it unless it is there. The user chooses what it is in.
    pub fn make_one(path: &Path) -> io::Result<Self> {
        let wrong = || io::Error::other(format!("{} is no path to a directory", path.display()));
        let (base, name) = (path.parent().ok_or_else(wrong)?, path.file_name().ok_or_else(wrong)?);
        Ok(Self { path: path.into(), own: enter(&File::open(base)?, name, path)? })
    }

    /// The same of a directory in a directory, both this user's alone.
    pub fn make(path: &Path) -> io::Result<Self> {
        let wrong =
            || io::Error::other(format!("{} is no path to a directory in a directory", path.display()));
        let outer = path.parent().ok_or_else(wrong)?;
        fs::create_dir_all(outer.parent().ok_or_else(wrong)?)?;
        let parent = Self::make_one(outer)?;
        let name = path.file_name().ok_or_else(wrong)?;
        Ok(Self { path: path.into(), own: enter(&parent.own, name, path)? })
    }

    /// Opens a file in it, which is made unless it is there.
    pub fn file(&self, name: &str) -> io::Result<File> {
        Ok(open(&self.own, name, OFlags::RDWR | OFlags::CREATE)?)
    }

    /// Whether the file of this name is this one.
    pub fn has(&self, name: &str, file: &File) -> bool {
        let id = |file: &File| file.metadata().ok().map(|found| (found.dev(), found.ino()));
        open(&self.own, name, OFlags::RDONLY).is_ok_and(|other| id(&other) == id(file))
    }

    /// Writes a file that is whole when others see it. `temporary` is a name of this process's.
    pub fn write(&self, name: &str, temporary: &str, bytes: &[u8]) -> io::Result<PathBuf> {
        self.remove(temporary);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        open(&self.own, temporary, flags)?.write_all(bytes)?;
        renameat(&self.own, temporary, &self.own, name)?;
        Ok(self.path.join(name))
    }

    pub fn remove(&self, name: &str) {
        let _ = unlinkat(&self.own, name, AtFlags::empty());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn base(name: &str) -> PathBuf {
        let base = std::env::temp_dir().join(format!("mpi4jax-folder-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&base);
        fs::create_dir_all(&base).unwrap();
        base
    }

    #[test]
    fn files_are_private_and_links_in_it_are_not_followed() {
        let base = base("links");
        let folder = Folder::make(&base.join("user/job")).unwrap();
        assert_eq!(fs::metadata(&folder.path).unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(base.join("victim"), "precious").unwrap();
        for name in ["a", "a.tmp"] {
            symlink(base.join("victim"), base.join("user/job").join(name)).unwrap();
        }
        assert!(folder.file("a").is_err());
        let file = folder.write("a", "a.tmp", b"ours").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "ours");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_to_string(base.join("victim")).unwrap(), "precious");
        let opened = folder.file("a").unwrap();
        assert!(folder.has("a", &opened));
        folder.remove("a");
        assert!(!folder.has("a", &opened));
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
            let error = Folder::make(&base.join(name).join("job")).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(fs::read_dir(base.join("elsewhere")).unwrap().count(), 0);
        if user() == 0 {
            fs::create_dir(base.join("theirs")).unwrap();
            fs::set_permissions(base.join("theirs"), fs::Permissions::from_mode(0o700)).unwrap();
            std::os::unix::fs::chown(base.join("theirs"), Some(12345), None).unwrap();
            let error = Folder::make(&base.join("theirs/job")).unwrap_err().to_string();
            assert!(error.contains("belongs to user 12345"), "{error}");
        }
        fs::remove_dir_all(&base).unwrap();
    }
}
