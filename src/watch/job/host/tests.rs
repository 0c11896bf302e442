//! Ranks of a host, each with files of its own, in one process.

use std::fs;
use std::io::Read as _;

use serde_json::json;

use super::super::mail::QuestionKind;
use super::*;
use crate::system::os;

fn directory(name: &str) -> PathBuf {
    let base = std::env::temp_dir().join(format!("mpi4jax-host-{name}-{}", std::process::id()));
    base.join("user").join("job")
}

fn remove(host: &HostFolder) {
    fs::remove_dir_all(host.directory.parent().unwrap().parent().unwrap()).unwrap();
}

/// Two ranks, each as if it had been started by itself: one process cannot be two ranks in files.
fn two(name: &str) -> (HostFolder, HostFolder) {
    (HostFolder::new(directory(name), 0, 2), HostFolder::new(directory(name), 1, 2))
}

fn lives(life: Life) -> RankStatus {
    RankStatus { life, ..RankStatus::default() }
}

fn life(host: &HostFolder, rank: i32) -> Option<Life> {
    host.status(rank).map(|status| status.life)
}

#[test]
fn a_directory_that_cannot_be_made_is_no_failure() {
    let host = HostFolder::new("/proc/mpi4jax/job".into(), 0, 2);
    assert!(host.broken().is_some());
    assert_eq!((host.world(), host.here().to_string()), (World::new(), "0".into()));
    assert!(!host.is_first_to("differs"));
    assert_eq!(host.choose_default("clone"), "clone");
}

#[test]
fn the_first_choice_holds_for_all() {
    let (a, b) = two("choice");
    assert_eq!(b.chosen_default(), None);
    assert_eq!(a.choose_default("world"), "world");
    assert_eq!(b.choose_default("clone"), "world");
    assert_eq!(b.chosen_default().as_deref(), Some("world"));
    remove(&a);
}

#[test]
fn the_last_samples_that_were_announced_are_read() {
    let (a, b) = two("announced");
    assert!(b.announced::<String>(0).is_empty());
    let words = |number: i32| format!("{number}, ä.py:1 ").repeat(9);
    (0..100).for_each(|number| a.announce(&words(number)));
    let announced = b.announced::<String>(0);
    assert!((10..60).contains(&announced.len()), "{}", announced.len());
    assert_eq!(announced, (100 - announced.len() as i32..100).map(words).collect::<Vec<_>>());
    remove(&a);
}

#[test]
fn ranks_ask_and_answer_and_end() {
    let (a, b) = two("ask");
    let question = Question::new(QuestionKind::End, 0);
    a.ask(&question).unwrap();
    assert_eq!(b.question(), Some(question.clone()));
    let answer = RankStatus {
        answered: question.time,
        other: Some("a thread".into()),
        process: b.process.name(),
        ..lives(Life::Runs)
    };
    b.publish(&answer).unwrap();
    b.dump(&serde_json::json!({})).unwrap();
    let world = a.world();
    assert_eq!((&world[&1], a.leader(|_| false), b.leader(|_| false)), (&answer, 0, 0));
    assert_eq!([a.is_first_to("differs"), b.is_first_to("differs")], [true, false]);
    a.wake(0);
    assert_eq!(b.leader(|rank| rank == 0), 1);
    b.request_report(0);
    let mut messages = [0; 16];
    let length = a.pipe().unwrap().read(&mut messages).unwrap();
    assert_eq!(
        (length, HostFolder::requested(&messages[..8]), HostFolder::requested(&messages[..4])),
        (8, Some(1), None)
    );
    assert_eq!((life(&a, 1), a.others_have_ended()), (Some(Life::Runs), (false, true)));
    b.publish(&lives(Life::Finished)).unwrap();
    assert_eq!((life(&a, 1), a.others_have_ended()), (Some(Life::Finished), (true, true)));
    b.leave();
    assert!(a.directory.exists());
    let _ = fs::remove_file(a.directory.join("rank1.json"));
    a.publish(&lives(Life::Finished)).unwrap();
    a.leave();
    assert!(!a.directory.exists());
    assert_eq!(a.world(), World::new(), "a rank whose files are removed is not gone");
    remove(&a);
}

/// A process of this machine as it introduces itself, but for its number, start or space.
fn introduced(changes: &[(&str, Value)]) -> Value {
    let mut process = serde_json::to_value(Process::own()).unwrap();
    changes.iter().for_each(|(field, value)| process[field] = value.clone());
    process
}

#[test]
fn files_of_other_processes_are_not_this_jobs() {
    let (a, b) = two("others");
    let path = b.directory.join("rank1.status");
    let finished = lives(Life::Finished);
    fs::write(&path, json!([introduced(&[("pid", json!(1))]), finished]).to_string()).unwrap();
    assert_eq!(life(&a, 1), Some(Life::Runs));
    // A live process that is rank 1 is not replaced.
    let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
    let start = os::info(child.id() as i32).unwrap().start;
    let process = introduced(&[("pid", json!(child.id())), ("start", json!(start))]);
    fs::write(b.directory.join("rank1.pid"), json!([process, 2]).to_string()).unwrap();
    let again = HostFolder::new(directory("others"), 1, 2);
    assert!(again.broken().is_some_and(|why| why.contains("is rank 1 of this job already")), "{again:?}");
    let other = HostFolder::new(directory("others"), 0, 2);
    assert_eq!(life(&other, 1), Some(Life::Runs));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(life(&other, 1), Some(Life::Gone));
    // One that had finished is no loss.
    fs::write(path, json!([process, finished]).to_string()).unwrap();
    assert_eq!(life(&other, 1), Some(Life::Finished));
    assert_eq!(HostFolder::new(directory("others"), 1, 2).broken(), None);
    remove(&a);
}

#[test]
#[cfg(target_os = "linux")]
fn only_what_killed_jobs_have_left_is_swept() {
    let (a, _b) = two("sweep");
    let pid = |changes: &[(&str, Value)], size: i32| json!([introduced(changes), size]).to_string();
    let gone = ("start", json!(1));
    let make = |job: &str, files: &[(&str, &str)]| {
        let folder = Folder::make(&a.directory.with_file_name(job)).unwrap();
        files.iter().for_each(|(name, text)| folder.create(name, text).unwrap());
    };
    make("killed", &[("rank0.pid", &pid(std::slice::from_ref(&gone), 1)), ("ask", "")]);
    make("incomplete", &[("rank0.pid", &pid(std::slice::from_ref(&gone), 2))]);
    make("elsewhere", &[("rank0.pid", &pid(&[gone.clone(), ("space", json!("another"))], 1))]);
    make("alive", &[("rank0.pid", &pid(&[], 1))]);
    make("dumps", &[("rank0.pid", &pid(std::slice::from_ref(&gone), 1)), ("rank0.json", "{}")]);
    make("new", &[]);
    let _ = HostFolder::new(directory("sweep"), 0, 2);
    for (job, stays) in [
        ("killed", false),
        ("incomplete", true),
        ("elsewhere", true),
        ("alive", true),
        ("dumps", true),
        ("new", true),
    ] {
        assert_eq!(a.directory.with_file_name(job).exists(), stays, "{job}");
    }
    remove(&a);
}
