//! A folder that this user alone can look into.
//!
//! It is made in a place where others write too, such as the temporary directory: what they may have put in its
//! place is refused, and no link is followed. What is in it is reached through the folder itself, not by its
//! path, so that nobody can exchange it later.

use std::collections::HashSet;
use std::ffi::{CStr, CString, OsStr};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// The user that this process writes as.
fn user() -> u32 {
    // SAFETY: takes nothing.
    unsafe { libc::geteuid() }
}

#[derive(Debug)]
pub struct Folder {
    pub path: PathBuf,
    parent: File,
    own: File,
    name: CString,
}

fn text(name: &OsStr) -> io::Result<CString> {
    Ok(CString::new(name.as_bytes())?)
}

fn result(code: i32) -> io::Result<i32> {
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(code) }
}

fn open_at(folder: RawFd, name: &CStr, flags: i32) -> io::Result<File> {
    let flags = flags | libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: a name that ends; the file is nobody else's.
    unsafe { Ok(File::from_raw_fd(result(libc::openat(folder, name.as_ptr(), flags, 0o600))?)) }
}

/// Opens a folder of this user's alone, which is made unless it is there.
fn enter(parent: &File, name: &CStr, path: &Path) -> io::Result<File> {
    // SAFETY: a name that ends.
    let made = result(unsafe { libc::mkdirat(parent.as_raw_fd(), name.as_ptr(), 0o700) });
    if let Err(error) = made
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error);
    }
    let refused = |words: String| io::Error::other(format!("{} {words}", path.display()));
    let file =
        open_at(parent.as_raw_fd(), name, libc::O_RDONLY | libc::O_DIRECTORY).map_err(|error| match error
            .raw_os_error()
        {
            Some(libc::ENOTDIR | libc::ELOOP) => {
                refused("is a link or not a folder; another user may have made it".into())
            }
            _ => error,
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
        // Whose this is and where its links lead is the user's to choose.
        let base = File::open(base)?;
        let parent = enter(&base, &text(outer_name)?, outer)?;
        let name = text(name)?;
        let own = enter(&parent, &name, path)?;
        Ok(Self { path: path.into(), parent, own, name })
    }

    /// The names in it.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// When a file in it came, went or was replaced, by its file system's clock.
    pub fn modified(&self) -> Option<SystemTime> {
        self.own.metadata().ok()?.modified().ok()
    }

    /// Its file system and number there, on this machine.
    pub fn identity(&self) -> Option<(u64, u64)> {
        let found = self.own.metadata().ok()?;
        Some((found.dev(), found.ino()))
    }

    /// What a file says, and when it was written.
    pub fn read(&self, name: &str) -> Option<(String, SystemTime)> {
        let mut file = open_at(self.own.as_raw_fd(), &CString::new(name).ok()?, libc::O_RDONLY).ok()?;
        let found = file.metadata().ok()?;
        if !found.is_file() || found.uid() != user() {
            return None;
        }
        let mut text = String::new();
        file.read_to_string(&mut text).ok()?;
        Some((text, found.modified().ok()?))
    }

    /// Writes a file that is not there yet.
    pub fn create(&self, name: &str, text: &str) -> io::Result<()> {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        open_at(self.own.as_raw_fd(), &CString::new(name)?, flags)?.write_all(text.as_bytes())
    }

    /// Writes a file that is whole when others see it. `temporary` is a name of this process's.
    pub fn write(&self, name: &str, temporary: &str, text: &str) -> io::Result<()> {
        self.remove(temporary);
        self.create(temporary, text)?;
        let (from, to) = (CString::new(temporary)?, CString::new(name)?);
        let folder = self.own.as_raw_fd();
        // SAFETY: names that end.
        result(unsafe { libc::renameat(folder, from.as_ptr(), folder, to.as_ptr()) }).map(drop)
    }

    /// A pipe by which other processes of this machine wake this one, open for as long as the process lives.
    pub fn make_bell(&self, name: &str) -> io::Result<RawFd> {
        let name = CString::new(name)?;
        // SAFETY: a name that ends.
        result(unsafe { libc::mkfifoat(self.own.as_raw_fd(), name.as_ptr(), 0o600) })?;
        // For both: without anybody who writes, it would be at its end.
        Ok(open_at(self.own.as_raw_fd(), &name, libc::O_RDWR)?.into_raw_fd())
    }

    /// Wakes the process of this pipe; nothing if there is none.
    pub fn ring(&self, name: &str) {
        let bell = CString::new(name).map(|name| open_at(self.own.as_raw_fd(), &name, libc::O_WRONLY));
        if let Ok(Ok(mut bell)) = bell
            && bell.metadata().is_ok_and(|found| found.file_type().is_fifo())
        {
            // A full one has been rung.
            let _ = bell.write_all(b"!");
        }
    }

    pub fn has(&self, name: &str) -> bool {
        CString::new(name).is_ok_and(|name| open_at(self.own.as_raw_fd(), &name, libc::O_RDONLY).is_ok())
    }

    pub fn remove(&self, name: &str) {
        if let Ok(name) = CString::new(name) {
            // SAFETY: a name that ends.
            let _ = result(unsafe { libc::unlinkat(self.own.as_raw_fd(), name.as_ptr(), 0) });
        }
    }

    /// Removes the folder itself, if nothing is in it.
    pub fn remove_self(&self) {
        // SAFETY: a name that ends.
        unsafe { libc::unlinkat(self.parent.as_raw_fd(), self.name.as_ptr(), libc::AT_REMOVEDIR) };
    }
}

/// For how long after a change the folder is read each time: clocks of file systems are coarse, so two changes may have
/// one time.
const UNSETTLED: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
struct Listed {
    names: HashSet<String>,
    /// When the folder was changed last, by its file system's clock, and when that was noticed.
    modified: Option<SystemTime>,
    noticed: Option<Instant>,
    /// It was read when that was long ago.
    settled: bool,
    number: u64,
}

/// What is in a folder, at the price of one look at the folder itself while nothing changes.
#[derive(Debug, Default)]
pub struct Listing(Mutex<Listed>);

impl Listing {
    fn state(&self) -> MutexGuard<'_, Listed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings it up to date. As long as it returns the same number, no file has come, gone or been replaced.
    pub fn look(&self, folder: &Folder) -> u64 {
        let mut state = self.state();
        let modified = folder.modified();
        if modified.is_none() || modified != state.modified {
            (state.modified, state.noticed) = (modified, Some(Instant::now()));
        } else if state.settled {
            return state.number;
        }
        state.settled = state.noticed.is_none_or(|at| at.elapsed() > UNSETTLED);
        state.names = folder.names().into_iter().collect();
        state.number += 1;
        state.number
    }

    pub fn has(&self, name: &str) -> bool {
        self.state().names.contains(name)
    }

    pub fn names(&self) -> Vec<String> {
        self.state().names.iter().cloned().collect()
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
            assert_eq!(folder.read("a"), None, "what somebody else has written");
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
    fn a_folder_is_read_when_it_changes() {
        let base = std::env::temp_dir().join(format!("mpi4jax-listing-{}", std::process::id()));
        let folder = Folder::make(&base.join("user/job")).unwrap();
        let listing = Listing::default();
        let mut last = listing.look(&folder);
        for name in ["a", "b"] {
            folder.write(name, "temporary", "").unwrap();
            let now = listing.look(&folder);
            assert!(now > last && listing.has(name) && !listing.has("temporary"));
            last = now;
        }
        folder.write("a", "temporary", "another").unwrap();
        let now = listing.look(&folder);
        assert!(now > last, "a file was replaced");
        listing.state().noticed = Some(Instant::now() - 2 * UNSETTLED);
        assert_eq!([(); 3].map(|()| listing.look(&folder)), [now + 1; 3], "it is read once more");
        folder.remove("b");
        assert!(listing.look(&folder) > now + 1 && !listing.has("b"));
        std::fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_bell_is_heard() {
        let base = base("bell");
        let folder = Folder::make(&base.join("user/job")).unwrap();
        let bell = folder.make_bell("bell").unwrap();
        let mut byte = [0u8; 8];
        // SAFETY: memory of ours; the file does not block.
        let mut heard = || unsafe { libc::read(bell, byte.as_mut_ptr().cast(), byte.len()) };
        assert_eq!(heard(), -1);
        for name in ["bell", "nobody's"] {
            folder.ring(name);
        }
        assert_eq!(heard(), 1);
        // What is no pipe is not written to.
        folder.create("file", "precious").unwrap();
        folder.ring("file");
        assert_eq!(folder.read("file").unwrap().0, "precious");
        fs::remove_dir_all(&base).unwrap();
    }
}
