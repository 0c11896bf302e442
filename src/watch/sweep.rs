//! What removes the files of jobs: their own last rank, or a later job.

use super::folder::Folder;
use super::peers::Peers;
use super::process::Process;

impl Peers {
    /// Removes what this job has left, but dumps.
    pub fn clean(&self) {
        let Ok(folder) = &self.folder else { return };
        folder.names().iter().filter(|name| !name.ends_with(".json")).for_each(|name| folder.remove(name));
        folder.remove_self(); // fails where dumps are left
    }

    /// At the very end, when all ranks have been in `MPI_Finalize`: the last rank that has come cleans up.
    pub fn leave(&self) {
        self.look();
        if self.has_finished(self.rank) && self.others_have_finished().0 {
            self.clean();
        }
    }
}

/// Removes what killed jobs have left beside this folder, except for dumps: where all of a job's processes were of this
/// machine, and are gone.
pub fn sweep(folder: &Folder, own: &Process) {
    for other in folder.siblings() {
        let names = other.names();
        if names.is_empty() || names.iter().any(|name| name.ends_with(".json")) {
            continue; // a job that begins now, or dumps
        }
        let pids = names.iter().filter(|name| name.ends_with(".pid"));
        let texts: Vec<String> = pids.filter_map(|name| Some(other.read(name)?.0)).collect();
        let is_gone = |text: &String| {
            let (process, size) = text.split_once('\n')?;
            let complete = size.trim().parse() == Ok(texts.len());
            Some(complete && own.knows_gone(&Process::parse(process)?))
        };
        if !texts.is_empty() && texts.iter().all(|text| is_gone(text) == Some(true)) {
            names.iter().for_each(|name| other.remove(name));
            other.remove_self();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::peers::tests::{directory, two};
    use super::*;

    #[test]
    fn only_what_killed_jobs_have_left_is_swept() {
        let (a, _b) = two("sweep");
        let own = fs::read_to_string(a.directory.join("rank0.pid")).unwrap();
        let (process, _) = own.split_once('\n').unwrap();
        let words: Vec<&str> = process.split(' ').collect();
        let gone = format!("{} {} 1 {}", words[0], words[1], words[3]);
        let elsewhere = format!("{} {} 1 another", words[0], words[1]);
        let make = |job: &str, files: &[(&str, &str)]| {
            let folder = Folder::make(&a.directory.with_file_name(job)).unwrap();
            files.iter().for_each(|(name, text)| folder.create(name, text).unwrap());
        };
        make("killed", &[("rank0.pid", &format!("{gone}\n1\n")), ("ask", "")]);
        make("incomplete", &[("rank0.pid", &format!("{gone}\n2\n"))]);
        make("elsewhere", &[("rank0.pid", &format!("{elsewhere}\n1\n"))]);
        make("alive", &[("rank0.pid", &format!("{process}\n1\n"))]);
        make("dumps", &[("rank0.pid", &format!("{gone}\n1\n")), ("rank0.json", "{}")]);
        make("new", &[]);
        let _ = Peers::new(directory("sweep"), 0, 2);
        for (job, stays) in [
            ("killed", false),
            ("incomplete", true),
            ("elsewhere", true),
            ("alive", true),
            ("dumps", true),
            ("new", true),
        ] {
            let swept_away = cfg!(target_os = "linux") && !stays;
            assert_eq!(a.directory.with_file_name(job).exists(), !swept_away, "{job}");
        }
        fs::remove_dir_all(a.directory.parent().unwrap().parent().unwrap()).unwrap();
    }
}
