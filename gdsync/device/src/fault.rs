//! Faults injected into the software HCA: what a network or a peer may do, on purpose and repeatably.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::address::Shuffle;
use crate::error::{Error, Result};
use mlx5_ring::Syndrome;

/// What goes wrong, seeded: the same plan and the same traffic of a queue pair meet the same faults.
///
/// Packet faults strike what this HCA sends, before the transport of the peer sees it. The text form, also taken from
/// the environment variable `GDSYNC_FAULTS`, is a list of `name=value` separated by commas:
///
/// | name | value |
/// |---|---|
/// | `seed` | number that selects the sequence of faults |
/// | `drop`, `duplicate`, `reorder` | probability per packet, 0 to 1 |
/// | `delay` | `probability:microseconds` |
/// | `fail-send`, `fail-recv` | `syndrome@index`, in hexadecimal: completes that work request (counted from 0 over the HCA) with an error |
/// | `die-after` | packets after which this HCA falls silent for ever |
///
/// ```
/// # use gdsync_device::FaultPlan;
/// let plan: FaultPlan = "seed=7,drop=0.01,delay=0.1:200,fail-send=13@4".parse().unwrap();
/// assert_eq!(plan.seed, 7);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FaultPlan {
    /// Selects the sequence.
    pub seed: u64,
    /// Probability that a packet is lost.
    pub drop: f64,
    /// Probability that a packet is sent twice.
    pub duplicate: f64,
    /// Probability that a packet is overtaken by the next one.
    pub reorder: f64,
    /// Probability that a packet is delayed, and the delay.
    pub delay: (f64, Duration),
    /// The send to fail, counted over all sends that this HCA fetches from now on, and its syndrome.
    pub fail_send: Option<(u64, Syndrome)>,
    /// The receive to fail, counted over all receives that this HCA consumes from now on, and its syndrome.
    pub fail_recv: Option<(u64, Syndrome)>,
    /// Number of packets after which the HCA neither sends nor receives.
    pub die_after: Option<u64>,
}

/// The text form, for error messages.
const EXPECTED: &str = "a list of seed=N, drop=P, duplicate=P, reorder=P, delay=P:MICROSECONDS, \
                        fail-send=SYNDROME@N, fail-recv=SYNDROME@N, die-after=N with P from 0 to 1";
/// The longest delay of a packet.
const MAX_DELAY: Duration = Duration::from_secs(3600);

impl FaultPlan {
    /// Checks the probabilities and the delay.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a probability outside 0 to 1, and for a delay of more than an hour.
    pub fn check(&self) -> Result<()> {
        for (what, p) in [
            ("drop probability", self.drop),
            ("duplicate probability", self.duplicate),
            ("reorder probability", self.reorder),
            ("delay probability", self.delay.0),
        ] {
            if !(0.0..=1.0).contains(&p) {
                return Err(Error::invalid(what, p, "0 to 1"));
            }
        }
        if self.delay.1 > MAX_DELAY {
            return Err(Error::invalid("delay", format!("{:?}", self.delay.1), "at most an hour"));
        }
        Ok(())
    }
}

impl FromStr for FaultPlan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut plan = Self::default();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let bad = || Error::invalid("fault", format!("'{item}'"), EXPECTED);
            let (name, value) = item.split_once('=').ok_or_else(bad)?;
            let probability = |v: &str| v.parse::<f64>().map_err(|_| bad());
            let number = |v: &str| v.parse::<u64>().map_err(|_| bad());
            let failure = || {
                let (syndrome, index) = value.split_once('@').ok_or_else(bad)?;
                let syndrome =
                    u8::from_str_radix(syndrome.trim_start_matches("0x"), 16).map_err(|_| bad())?;
                Ok::<_, Error>(Some((number(index)?, Syndrome(syndrome))))
            };
            match name {
                "seed" => plan.seed = number(value)?,
                "drop" => plan.drop = probability(value)?,
                "duplicate" => plan.duplicate = probability(value)?,
                "reorder" => plan.reorder = probability(value)?,
                "delay" => {
                    let (p, us) = value.split_once(':').ok_or_else(bad)?;
                    plan.delay = (probability(p)?, Duration::from_micros(number(us)?));
                }
                "fail-send" => plan.fail_send = failure()?,
                "fail-recv" => plan.fail_recv = failure()?,
                "die-after" => plan.die_after = Some(number(value)?),
                _ => return Err(bad()),
            }
        }
        plan.check()?;
        Ok(plan)
    }
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is sent.
    Pass,
    /// It is lost.
    Drop,
    /// It arrives twice.
    Duplicate,
    /// Held back until the next packet has passed.
    Reorder,
    /// It is delayed.
    Delay(Duration),
}

/// A fault plan in force.
#[derive(Default)]
pub struct Faults {
    plan: FaultPlan,
    /// Maps queue pair numbers, which are random, to their order of creation: so faults are reproducible.
    qpns: Shuffle<24>,
    packets: bool,
    sends: u64,
    recvs: u64,
    sent: u64,
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.plan.fmt(f)
    }
}

impl Faults {
    /// The faults of a plan; `qpns` maps queue pair numbers to the order in which they were made.
    pub fn new(plan: FaultPlan, qpns: Shuffle<24>) -> Self {
        let packets = plan.drop > 0.0
            || plan.duplicate > 0.0
            || plan.reorder > 0.0
            || plan.delay.0 > 0.0
            || plan.die_after.is_some();
        Self { qpns, plan, packets, ..Self::default() }
    }

    /// The fate of the `index`-th packet of queue pair `qpn`.
    pub fn fate(&self, qpn: u32, index: u64) -> Fate {
        if !self.packets {
            return Fate::Pass;
        }
        if self.is_dead() {
            return Fate::Drop;
        }
        // 53 random bits in 0..1, compared with the cumulative probabilities.
        let key = self.qpns.find(qpn);
        let bits = mix(self.plan.seed ^ mix(u64::from(key) << 40 ^ index)) >> 11;
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
        let mut x = bits as f64 / (1u64 << 53) as f64;
        let mut hit = |p: f64| {
            let hit = x < p;
            x -= p;
            hit
        };
        if hit(self.plan.drop) {
            Fate::Drop
        } else if hit(self.plan.duplicate) {
            Fate::Duplicate
        } else if hit(self.plan.reorder) {
            Fate::Reorder
        } else if hit(self.plan.delay.0) {
            Fate::Delay(self.plan.delay.1)
        } else {
            Fate::Pass
        }
    }

    /// Counts a packet sent.
    pub fn count_packet(&mut self) {
        self.sent += 1;
    }

    /// Whether the HCA has fallen silent.
    pub fn is_dead(&self) -> bool {
        self.plan.die_after.is_some_and(|after| self.sent >= after)
    }

    /// Counts a fetched send. Returns its syndrome if it is the one to fail.
    pub fn next_send(&mut self) -> Option<Syndrome> {
        Self::next(&mut self.sends, self.plan.fail_send)
    }

    /// Counts a consumed receive. Returns its syndrome if it is the one to fail.
    pub fn next_recv(&mut self) -> Option<Syndrome> {
        Self::next(&mut self.recvs, self.plan.fail_recv)
    }

    fn next(count: &mut u64, fail: Option<(u64, Syndrome)>) -> Option<Syndrome> {
        let n = *count;
        *count += 1;
        fail.filter(|(index, _)| *index == n).map(|(_, syndrome)| syndrome)
    }
}

/// SplitMix64's finalizer: every input bit changes every output bit.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_form_covers_every_field() {
        let plan: FaultPlan =
            "seed=3, drop=0.5,duplicate=0.25,reorder=0.125,delay=0.0625:40,fail-send=0x15@2,fail-recv=4@0,die-after=9"
                .parse()
                .unwrap();
        let expected = FaultPlan {
            seed: 3,
            drop: 0.5,
            duplicate: 0.25,
            reorder: 0.125,
            delay: (0.0625, Duration::from_micros(40)),
            fail_send: Some((2, Syndrome(0x15))),
            fail_recv: Some((0, Syndrome(4))),
            die_after: Some(9),
        };
        assert_eq!(plan, expected);
        assert_eq!("".parse::<FaultPlan>().unwrap(), FaultPlan::default());
        for bad in
            ["drop", "drop=x", "drop=1.5", "drop=-0.1", "drop=nan", "delay=0.5", "fail-send=13", "what=1"]
        {
            let error = bad.parse::<FaultPlan>().unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{bad}: {error}");
        }
    }

    #[test]
    fn fates_repeat_with_the_seed_and_follow_the_probabilities() {
        let plan = FaultPlan { seed: 1, drop: 0.1, duplicate: 0.2, reorder: 0.3, ..FaultPlan::default() };
        let draw = |plan: &FaultPlan| {
            let faults = Faults::new(plan.clone(), Shuffle::default());
            (0..100_000).map(|i| faults.fate(5, i)).collect::<Vec<_>>()
        };
        let fates = draw(&plan);
        assert_eq!(fates, draw(&plan));
        assert_ne!(fates, draw(&FaultPlan { seed: 2, ..plan }));
        for (fate, share) in [(Fate::Drop, 10), (Fate::Duplicate, 20), (Fate::Reorder, 30), (Fate::Pass, 40)]
        {
            let percent = fates.iter().filter(|f| **f == fate).count().div_ceil(1000);
            assert!(percent.abs_diff(share) <= 1, "{fate:?}: {percent} %");
        }
    }
}
