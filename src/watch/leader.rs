//! The leader of a host: it collects the states of all ranks, answers the leaders of other hosts, and carries out the actions
//! of [`decide`].

use std::collections::HashMap;

use super::decide::{self, Action, Key, Memory, Observation};
use super::end::{self, HUNG};
use super::graph::Why;
use super::report::{self, Facts};
use super::settings::Settings;
use super::this_rank::ThisRank;
use crate::output::print;
use crate::system::os;
use crate::watch::job::host::HostFolder;
use crate::watch::job::link;
use crate::watch::job::mail::{Mail, Message, Question, QuestionKind};
use crate::watch::job::status::{Life, RankStatus, World, compare_origins, wait_of};

/// For how long a leader waits for the ranks of its host, where another host asks.
const ANSWER_TIME_HERE: f64 = 3.0;
/// For how long a request for a report stands for those of other ranks too.
const ONE_REQUEST: f64 = 3.0;

pub struct Leader {
    host: &'static HostFolder,
    settings: &'static Settings,
    memory: Memory,
    /// The states of all ranks, as far as known, and when each of their waits began.
    state: Observation,
    since: HashMap<Key, f64>,
    /// The last question to the ranks of this host: its time, and when they were asked.
    asked: (u64, f64),
    /// Questions of other hosts that are not answered yet, each with the rank that has asked.
    pending: Vec<(i32, Question)>,
    /// The rank that the user asked for a report last, and when.
    requested: Option<(i32, f64)>,
}

impl Leader {
    pub fn new(host: &'static HostFolder, settings: &'static Settings) -> Self {
        Self {
            host,
            settings,
            memory: Memory::default(),
            state: Observation::default(),
            since: HashMap::new(),
            asked: (0, 0.0),
            pending: Vec::new(),
            requested: None,
        }
    }

    /// For how long a rank has waited at most, as far as is known.
    pub fn longest(&self) -> f64 {
        let waits = self.state.world.values().flat_map(|rank| &rank.waits);
        waits.map(|wait| wait.seconds).fold(0.0, f64::max)
    }

    /// Whether a question is under way.
    pub fn is_asking(&self) -> bool {
        self.memory.question.is_some() || !self.pending.is_empty()
    }

    /// Whether there is nothing to do as long as no rank of this host waits.
    pub fn is_idle(&self) -> bool {
        !self.is_asking()
            && self.state.report_for.is_none()
            && self.state.world.values().all(|rank| rank.waits.is_empty())
    }

    /// The user asks a rank for a report. Launchers pass the signal on to all ranks, which is one request.
    pub fn report(&mut self, rank: i32, now: f64) {
        if self.requested.is_none_or(|(before, at)| before == rank || now - at > ONE_REQUEST) {
            (self.requested, self.state.report_for) = (Some((rank, now)), Some(rank));
        }
    }

    /// Takes the questions that have come.
    pub fn listen(&mut self, this_rank: &mut ThisRank, now: f64) {
        let questions = link::mail().take_questions();
        for (from, question) in questions {
            self.state.heard.note(from < self.host.rank, question.kind, now);
            self.ask_here(&Question::new(question.kind, self.host.rank), this_rank, now);
            self.pending.push((from, question));
        }
    }

    pub fn step(&mut self, this_rank: &mut ThisRank, now: f64) {
        self.observe(this_rank, now);
        let report_after = self.settings.report_after;
        let settings = decide::Settings { report_after, host: link::mail().place() };
        let (memory, actions) = decide::decide(&self.state, &self.memory, &settings, now);
        self.memory = memory;
        for action in actions {
            match action {
                Action::Ask(kind) => {
                    let question = Question::new(kind, self.host.rank);
                    link::post(|mail| mail.ask(&question));
                    self.ask_here(&question, this_rank, now);
                    if kind == QuestionKind::Report {
                        self.state.report_for = None;
                    }
                }
                Action::AskAgain => link::post(Mail::ask_again),
                Action::PrintLine(key) => print(&self.facts(this_rank).line(key).unwrap_or_default()),
                Action::PrintReport(rank) => {
                    print(&self.facts(this_rank).report("report (SIGUSR1)", (rank, None), self.host.rank));
                }
                Action::End(key, why) => self.end(key, &why, this_rank),
            }
        }
    }

    /// Asks the ranks of this host what they do.
    fn ask_here(&mut self, question: &Question, this_rank: &mut ThisRank, now: f64) {
        this_rank.trouble = self.host.ask(question).err().map(|error| error.to_string());
        self.asked = (question.time, now);
        this_rank.publish(self.host, Some(question.clone()), now);
    }

    /// Updates the states of all ranks, and answers other hosts.
    fn observe(&mut self, this_rank: &ThisRank, now: f64) {
        let mut here = self.host.world();
        here.extend(this_rank.published().map(|status| (self.host.rank, status.clone())));
        let (asked, asked_at) = self.asked;
        let has_answered = |status: &RankStatus| status.answered >= asked || status.life != Life::Runs;
        let all_here = here.values().all(has_answered) || this_rank.trouble.is_some();
        if self.is_asking() {
            here.values_mut().for_each(|status| status.is_silent = !has_answered(status));
        }
        if all_here || now - asked_at > ANSWER_TIME_HERE {
            for (from, question) in self.pending.drain(..) {
                link::post(|mail| mail.answer(from, Message::answer(question, &here)));
            }
        }
        let is_asking = self.memory.question.is_some();
        let is_answered = all_here && (!is_asking || link::mail().is_answered());
        let world = &mut self.state.world;
        if is_asking && (is_answered || !self.memory.expects_answers(now)) {
            *world = link::mail().answers();
        } else if self.memory.is_idle() || here.is_empty() {
            world.clear();
        }
        world.extend(here);
        count_seconds(&mut self.since, world, now);
        compare_origins(world);
        self.state.is_debugged = os::is_debugged();
        self.state.is_answered = is_answered;
    }

    fn facts(&self, this_rank: &ThisRank) -> Facts<'_> {
        Facts {
            world: &self.state.world,
            size: self.host.size,
            directory: &self.host.directory,
            trouble: this_rank.trouble.clone(),
            asks_hosts: link::is_open(),
        }
    }

    /// An operation hangs: this rank reports for all, and ends the job.
    fn end(&self, key: Key, why: &Why, this_rank: &ThisRank) {
        let Some(wait) = wait_of(&self.state.world, key) else { return };
        let headline = report::headline(&self.state.world, key, wait, why);
        let mut text = self.facts(this_rank).report(&headline, (key.0, Some(key.1)), self.host.rank);
        let ends = self.settings.abort;
        text += if ends {
            "  the job is ended (MPI4JAX_ON_TIMEOUT=continue: it goes on)\n"
        } else {
            "  the job goes on (MPI4JAX_ON_TIMEOUT=continue)\n"
        };
        if let Some(file) = self.host.leave_report(&text) {
            text += &format!("  this report: {}\n", file.display());
        }
        print(&text);
        if ends {
            end::end_job(HUNG);
        }
    }
}

/// Sets how long waits have lasted, by the clock of this process, from when it saw each first.
fn count_seconds(since: &mut HashMap<Key, f64>, world: &mut World, now: f64) {
    let mut found = HashMap::new();
    for (rank, status) in world.iter_mut() {
        for wait in &mut status.waits {
            let key = (*rank, wait.id);
            let began = since.get(&key).copied().unwrap_or(now - wait.seconds);
            wait.seconds = now - began;
            found.insert(key, began);
        }
    }
    *since = found;
}
