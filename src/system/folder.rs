//! A folder that this user alone can look into.
//!
//! It is made in a place where others write too, such as the temporary directory: what they may have put in its
//! place is refused, and no link is followed. What is in it is reached through the folder itself, not by its
//! path, so that it cannot be exchanged later.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

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
    parent: File,
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
            refused("is a link or not a folder; another user may have made it".into())
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
    /// Opens a folder in a folder, both this user's alone, and makes them unless they are there.
    pub fn make(path: &Path) -> io::Result<Self> {
        let wrong = || io::Error::other(format!("{} is no path to a folder in a folder", path.display()));
        let (outer, name) = (path.parent().ok_or_else(wrong)?, path.file_name().ok_or_else(wrong)?);
        let (base, outer_name) = (outer.parent().ok_or_else(wrong)?, outer.file_name().ok_or_else(wrong)?);
        fs::create_dir_all(base)?;
        // The user chooses which base that is, and where its links lead.
        let parent = enter(&File::open(base)?, outer_name, outer)?;
        let own = enter(&parent, name, path)?;
        Ok(Self { path: path.into(), parent, own })
    }

    /// The names in it.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// Its file system and number there, on this machine.
    pub fn identity(&self) -> Option<(u64, u64)> {
        let found = self.own.metadata().ok()?;
        Some((found.dev(), found.ino()))
    }

    /// Whether its path still leads to it.
    pub fn is_in_place(&self) -> bool {
        let there = fs::symlink_metadata(&self.path).ok().map(|found| (found.dev(), found.ino()));
        there.is_some() && there == self.identity()
    }

    /// What a file says, and when it was written.
    pub fn read(&self, name: &str) -> Option<(String, SystemTime)> {
        self.read_end(name, u64::MAX)
    }

    /// The last bytes of a file, which may begin within a line, and when it was written.
    pub fn read_end(&self, name: &str, most: u64) -> Option<(String, SystemTime)> {
        let mut file = open(&self.own, name, OFlags::RDONLY).ok()?;
        let found = file.metadata().ok()?;
        if !found.is_file() || found.uid() != user() {
            return None;
        }
        file.seek(SeekFrom::Start(found.len().saturating_sub(most))).ok()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        Some((String::from_utf8_lossy(&bytes).into_owned(), found.modified().ok()?))
    }

    /// Writes a file that is not there yet.
    pub fn create(&self, name: &str, text: &str) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        open(&self.own, name, flags)?.write_all(text.as_bytes())
    }

    /// Writes at the end of a file. That costs a tenth of [`write`](Self::write): ext4 allocates blocks where one file replaces
    /// another.
    pub fn append(&self, name: &str, text: &str) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND;
        open(&self.own, name, flags)?.write_all(text.as_bytes())
    }

    /// Writes a file that is whole when others see it. `temporary` is a name of this process's.
    pub fn write(&self, name: &str, temporary: &str, text: &str) -> io::Result<()> {
        self.remove(temporary);
        self.create(temporary, text)?;
        Ok(renameat(&self.own, temporary, &self.own, name)?)
    }

    /// A pipe by which other processes of this machine wake this one.
    pub fn make_pipe(&self, name: &str) -> io::Result<File> {
        let path = CString::new(name)?;
        // SAFETY: a name that ends.
        if unsafe { libc::mkfifoat(self.own.as_raw_fd(), path.as_ptr(), 0o600) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // For both: without a writer, it would be at its end.
        Ok(open(&self.own, name, OFlags::RDWR)?)
    }

    /// Wakes the process of this pipe by these bytes; nothing if there is none.
    pub fn notify(&self, name: &str, bytes: &[u8]) {
        if let Ok(mut pipe) = open(&self.own, name, OFlags::WRONLY)
            && pipe.metadata().is_ok_and(|found| found.file_type().is_fifo())
        {
            // If it is full, the process wakes up anyway.
            let _ = pipe.write_all(bytes);
        }
    }

    pub fn has(&self, name: &str) -> bool {
        open(&self.own, name, OFlags::RDONLY).is_ok()
    }

    pub fn remove(&self, name: &str) {
        let _ = unlinkat(&self.own, name, AtFlags::empty());
    }

    /// Removes the folder itself, if nothing is in it.
    pub fn remove_self(&self) {
        if let Some(name) = self.path.file_name() {
            let _ = unlinkat(&self.parent, name, AtFlags::REMOVEDIR);
        }
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
    fn files_are_this_users_alone() {
        let base = base("files");
        let folder = Folder::make(&base.join("user/job")).unwrap();
        for path in [base.join("user"), base.join("user/job")] {
            assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o700);
        }
        folder.write("a", "a.tmp", "first").unwrap();
        folder.write("a", "a.tmp", "second").unwrap();
        assert_eq!(folder.read("a").unwrap().0, "second");
        assert_eq!(fs::metadata(base.join("user/job/a")).unwrap().mode() & 0o777, 0o600);
        assert!(folder.create("a", "").is_err());
        // It is the folder that counts, not its path.
        fs::rename(base.join("user"), base.join("elsewhere")).unwrap();
        assert_eq!(folder.read("a").unwrap().0, "second");
        if user() == 0 {
            std::os::unix::fs::chown(base.join("elsewhere/job/a"), Some(12345), None).unwrap();
            assert_eq!(folder.read("a"), None, "what another user has written");
        }
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

    #[test]
    fn links_in_it_are_not_followed() {
        let base = base("links");
        let folder = Folder::make(&base.join("user/job")).unwrap();
        fs::write(base.join("victim"), "precious").unwrap();
        for name in ["a", "a.tmp"] {
            symlink(base.join("victim"), base.join("user/job").join(name)).unwrap();
        }
        assert_eq!(folder.read("a"), None);
        folder.write("a", "a.tmp", "ours").unwrap();
        assert_eq!(folder.read("a").unwrap().0, "ours");
        assert_eq!(fs::read_to_string(base.join("victim")).unwrap(), "precious");
        fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn a_pipe_wakes_its_process() {
        let base = base("pipe");
        let folder = Folder::make(&base.join("user/job")).unwrap();
        let pipe = folder.make_pipe("pipe").unwrap();
        let mut bytes = [0u8; 8];
        assert!((&pipe).read(&mut bytes).is_err(), "it does not block");
        for name in ["pipe", "another's"] {
            folder.notify(name, b"ring");
        }
        assert_eq!((&pipe).read(&mut bytes).unwrap(), 4);
        // What is no pipe is not written to.
        folder.create("file", "precious").unwrap();
        folder.notify("file", b"!");
        assert_eq!(folder.read("file").unwrap().0, "precious");
        fs::remove_dir_all(&base).unwrap();
    }
}
