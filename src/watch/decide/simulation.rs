//! Many ranks on many hosts: what the leaders ask and decide, with messages that take their time, ranks and hosts that are gone.
//! Decisions and messages are the real ones; MPI, files and threads are left out.
//!
//! `MPI4JAX_SIMULATION=800x125 cargo test --release simulation` runs it with so many hosts and ranks on each.

use super::*;
use crate::watch::job::mail::{Mail, Message, Question as Asked};
use crate::watch::job::ranks::Ranks;
use crate::watch::job::status::{CommId, Peer};

/// How long a message takes, and how often a leader looks for some: seconds.
const STEP: f64 = 0.25;

struct SimulatedHost {
    ranks: Ranks,
    mail: Mail,
    memory: Memory,
    heard: Heard,
    /// What its ranks wait for, from 0 on.
    here: World,
    far: World,
}

struct Job {
    hosts: Vec<SimulatedHost>,
    under_way: Vec<(i32, i32, Message)>,
    now: f64,
    /// Hosts that nothing reaches, and ranks that carry no messages.
    cut_off: Vec<usize>,
    dead: Vec<i32>,
    messages: usize,
    bytes: usize,
    questions: Vec<(usize, f64)>,
    lines: Vec<(usize, f64)>,
    ends: Vec<(usize, f64, Why)>,
}

fn size() -> (i32, i32) {
    let setting = std::env::var("MPI4JAX_SIMULATION").unwrap_or("40x25".into());
    let (hosts, ranks) = setting.split_once('x').expect("HOSTSxRANKS");
    (hosts.parse().unwrap(), ranks.parse().unwrap())
}

impl Job {
    fn new((hosts, per_host): (i32, i32), rank: impl Fn(i32) -> RankStatus) -> Self {
        let names: Vec<u64> = (0..hosts * per_host).map(|rank| 1 + (rank / per_host) as u64).collect();
        let host = |host: i32| {
            let first = host * per_host;
            let ranks: Ranks = (first..first + per_host).collect();
            let mail = Mail::new(&names, first);
            let here = ranks.iter().map(|it| (it, rank(it))).collect();
            SimulatedHost {
                ranks,
                mail,
                memory: Memory::default(),
                heard: Heard::default(),
                here,
                far: World::new(),
            }
        };
        Self {
            hosts: (0..hosts).map(host).collect(),
            under_way: Vec::new(),
            now: 0.0,
            cut_off: Vec::new(),
            dead: Vec::new(),
            messages: 0,
            bytes: 0,
            questions: Vec::new(),
            lines: Vec::new(),
            ends: Vec::new(),
        }
    }

    fn host_of(&self, rank: i32) -> usize {
        self.hosts.partition_point(|host| host.ranks.iter().last() < Some(rank))
    }

    fn here(&self, host: usize) -> World {
        let mut here = self.hosts[host].here.clone();
        here.values_mut().flat_map(|rank| &mut rank.waits).for_each(|wait| wait.seconds = self.now);
        here
    }

    fn step(&mut self) {
        self.now += STEP;
        for (from, to, message) in std::mem::take(&mut self.under_way) {
            let ends = [self.host_of(from), self.host_of(to)];
            self.messages += 1;
            self.bytes += message.encode().len();
            if ends.iter().any(|host| self.cut_off.contains(host)) || self.dead.contains(&to) {
                continue;
            }
            let here = self.here(ends[1]);
            let host = &mut self.hosts[ends[1]];
            host.mail.receive(from, message);
            for (by, question) in host.mail.take_questions() {
                host.heard.note(by < to, question.kind, self.now);
                self.under_way.push((to, by, Message::answer(question, &here)));
            }
        }
        for host in 0..self.hosts.len() {
            self.decide(host);
            // The leader of the host is its first rank that carries messages.
            let leader = self.hosts[host].ranks.iter().find(|rank| !self.dead.contains(rank)).unwrap();
            let outgoing = self.hosts[host].mail.take_outbox();
            self.under_way.extend(outgoing.into_iter().map(|(to, message)| (leader, to, message)));
        }
    }

    fn decide(&mut self, place: usize) {
        let here = self.here(place);
        let (now, count) = (self.now, self.hosts.len());
        let host = &mut self.hosts[place];
        // As often as a leader decides whose ranks wait, or that has asked.
        if host.memory.question.is_none() && now.fract() != 0.0 {
            return;
        }
        let is_asking = host.memory.question.is_some();
        let is_answered = !is_asking || host.mail.is_answered();
        if is_asking && (is_answered || !host.memory.expects_answers(now)) {
            host.far = host.mail.answers();
        } else if host.memory.is_idle() {
            host.far.clear();
        }
        let mut world = host.far.clone();
        world.extend(here);
        let state = Observation { world, heard: host.heard, is_answered, ..Observation::default() };
        let settings = Settings { report_after: 30.0, host: (place, count) };
        let (memory, actions) = decide(&state, &host.memory, &settings, now);
        host.memory = memory;
        for action in actions {
            match action {
                Action::Ask(kind) => {
                    host.mail.ask(&Asked {
                        kind,
                        rank: host.ranks.first().unwrap(),
                        time: (4.0 * now) as u64,
                    });
                    self.questions.push((place, now));
                }
                Action::AskAgain => host.mail.ask_again(),
                Action::PrintLine(_) => self.lines.push((place, now)),
                Action::PrintReport(_) => {}
                Action::End(_, why) => self.ends.push((place, now, why)),
            }
        }
    }

    fn run(&mut self, until: f64) {
        while self.now < until && self.ends.is_empty() {
            self.step();
        }
    }
}

const ALL: CommId = CommId { class: 1, origin: 1, name: 0 };

fn waits(need: Need, members: Ranks) -> RankStatus {
    let counts = if let Need::Collective { comm, number } = need { vec![(comm, number)] } else { Vec::new() };
    let words = "it, a.py:9".into();
    let wait = Wait {
        id: WaitId::Operation(9),
        need,
        members,
        seconds: 0.0,
        bytes: 4,
        late: String::new(),
        words,
        has_line: true,
    };
    RankStatus { life: Life::Runs, waits: vec![wait], counts, ..RankStatus::default() }
}

fn slow() -> RankStatus {
    RankStatus { life: Life::Runs, ..RankStatus::default() }
}

/// All ranks wait for one that computes: one host asks, after 4, 8, 15, 30, and 60 seconds, and prints two lines.
#[test]
fn a_slow_rank_costs_few_messages() {
    let (hosts, per_host) = size();
    let n = hosts * per_host;
    let barrier = || waits(Need::Collective { comm: ALL, number: 5 }, Ranks::all(n));
    let mut job = Job::new((hosts, per_host), |rank| if rank == n / 2 { slow() } else { barrier() });
    job.run(70.0);
    assert_eq!(job.ends, []);
    println!(
        "{} messages, {} bytes, asked {:?}, lines {:?}",
        job.messages, job.bytes, job.questions, job.lines
    );
    assert_eq!(job.questions, [4.0, 8.0, 15.0, 30.0, 60.0].map(|at| (0, at)), "the first host alone asks");
    assert_eq!(job.lines, [30.0, 60.0].map(|at| (0, at + 0.5)), "and speaks");
    assert_eq!(job.messages, 2 * 5 * (hosts as usize - 1), "a question and an answer for each other host");
}

/// Two ranks on two hosts receive from each other, on others ranks compute, and one host is cut off: the job ends.
#[test]
fn a_knot_of_two_hosts_is_found() {
    let (hosts, per_host) = size();
    let n = hosts * per_host;
    let recv = |from: i32| {
        let from = Some(Peer { rank: Some(from), tag: Some(7) });
        waits(Need::Message { comm: ALL, from, to: None }, Ranks::all(n))
    };
    let (a, b) = (per_host, (hosts - 1) * per_host + 1);
    let of = |rank: i32| {
        if rank == a {
            recv(b)
        } else if rank == b {
            recv(a)
        } else {
            slow()
        }
    };
    let mut job = Job::new((hosts, per_host), of);
    job.cut_off = vec![2];
    // The leader of the second one's host is gone from the network: its second rank answers.
    job.dead = vec![b - 1];
    job.run(30.0);
    let (_, at, why) = &job.ends[0];
    assert!(matches!(why, Why::Stuck(_)) && *at <= 20.0, "{why:?} at {at}");
    println!("{} messages, {} bytes, asked {:?}, ended at {at} s", job.messages, job.bytes, job.questions);
    // Where the ranks' hosts cannot be reached, nothing is proved.
    let mut job = Job::new((hosts, per_host), of);
    job.cut_off = vec![1];
    job.run(30.0);
    assert_eq!(job.ends, []);
}

/// Each rank of the job waits for the next one: the largest knot that there is, of which no two ranks say the same.
#[test]
fn a_ring_of_all_ranks_is_a_knot() {
    let (hosts, per_host) = size();
    let n = hosts * per_host;
    let recv = |rank: i32| {
        let from = Some(Peer { rank: Some((rank + 1) % n), tag: None });
        waits(Need::Message { comm: ALL, from, to: None }, Ranks::all(n))
    };
    let mut job = Job::new((hosts, per_host), recv);
    job.run(30.0);
    let (_, at, why) = &job.ends[0];
    assert!(matches!(why, Why::Stuck(_)) && *at <= 15.0, "{why:?} at {at}");
    println!("{} messages, {} bytes, ended at {at} s", job.messages, job.bytes);
    // With one of them that computes, it is none: all others may still be served, one after another.
    let mut job = Job::new((hosts, per_host), |rank| if rank == 3 { slow() } else { recv(rank) });
    job.run(20.0);
    assert_eq!(job.ends, []);
}
