//! `strftime_now`.

use std::time::{SystemTime, UNIX_EPOCH};

use super::Fail;

/// A date in the directives of Python on Linux, which are those of glibc; UTC, where transformers
/// takes the time of the place.
pub(super) fn strftime(format: &str, now: Option<u64>) -> Result<String, Fail> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let now = now
        .unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
        // The year 9999; beyond it no format agrees on what to print.
        .min(253_402_300_799);
    let (days, secs) = (now / 86_400, now % 86_400);
    let (year, month, day) = civil(days);
    let (weekday, name) = (DAYS[(days % 7) as usize], MONTHS[(month - 1) as usize]);
    let (hour, minute, second) = (secs / 3600, secs / 60 % 60, secs % 60);
    let (from_monday, from_sunday) = ((days + 3) % 7, (days + 4) % 7);
    let day_of_year = days - day_number(year, 1, 1) + 1;
    let twelve = (hour + 11) % 12 + 1;
    let (iso_year, iso_week) = iso_week(days);
    let half = if hour < 12 { "AM" } else { "PM" };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // How glibc pads: `-` not at all, `_` with spaces, `0` with zeros.
        let pad = directive.filter(|c| matches!(c, '-' | '_' | '0'));
        if pad.is_some() {
            directive = chars.next();
        }
        let number = |n: u64, width: usize, usual: char| match pad.unwrap_or(usual) {
            '-' => n.to_string(),
            '_' => format!("{n:width$}"),
            _ => format!("{n:0width$}"),
        };
        let (date, time) =
            (format!("{month:02}/{day:02}/{:02}", year % 100), format!("{hour:02}:{minute:02}:{second:02}"));
        out.push_str(&match directive {
            Some('Y') => number(year, 4, '-'),
            Some('y') => number(year % 100, 2, '0'),
            Some('C') => number(year / 100, 2, '0'),
            Some('m') => number(month, 2, '0'),
            Some('d') => number(day, 2, '0'),
            Some('e') => number(day, 2, '_'),
            Some('j') => number(day_of_year, 3, '0'),
            Some('B') => name.to_owned(),
            Some('b' | 'h') => name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('w') => from_sunday.to_string(),
            Some('u') => (from_monday + 1).to_string(),
            Some('U') => number((day_of_year + 6 - from_sunday) / 7, 2, '0'),
            Some('W') => number((day_of_year + 6 - from_monday) / 7, 2, '0'),
            Some('V') => number(iso_week, 2, '0'),
            Some('G') => number(iso_year, 4, '-'),
            Some('g') => number(iso_year % 100, 2, '0'),
            Some('H') => number(hour, 2, '0'),
            Some('k') => number(hour, 2, '_'),
            Some('I') => number(twelve, 2, '0'),
            Some('l') => number(twelve, 2, '_'),
            Some('p') => half.to_owned(),
            Some('P') => half.to_lowercase(),
            Some('M') => number(minute, 2, '0'),
            Some('S') => number(second, 2, '0'),
            Some('s') => now.to_string(),
            // The clock is read to the second.
            Some('f') => "000000".to_owned(),
            // A time without a zone, as Python's `datetime.now()` is.
            Some('z' | 'Z') => String::new(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('D' | 'x') => date,
            Some('T' | 'X') => time,
            Some('R') => format!("{hour:02}:{minute:02}"),
            Some('r') => format!("{twelve:02}:{minute:02}:{second:02} {half}"),
            Some('c') => format!("{} {} {day:2} {time} {year}", &weekday[..3], &name[..3]),
            Some('n') => "\n".to_owned(),
            Some('t') => "\t".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let other = other.map_or_else(|| "the end".to_owned(), |c| format!("`{}`", c.escape_debug()));
                return Err(Fail::new(format!("strftime_now: the format should have no {other} behind `%`")));
            }
        });
        if out.len() > 1 << 20 {
            return Err(Fail::new("strftime_now: the format should be shorter"));
        }
    }
    Ok(out)
}

/// The number of a day since 1970-01-01.
fn day_number(year: u64, month: u64, day: u64) -> u64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, yoe) = (year / 400, year % 400);
    let doy = (153 * (if month > 2 { month - 3 } else { month + 9 }) + 2) / 5 + day - 1;
    era * 146_097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719_468
}

/// Year and week by ISO 8601: a week belongs to the year of its Thursday.
fn iso_week(days: u64) -> (u64, u64) {
    let thursday = days + 3 - (days + 3) % 7;
    let (year, ..) = civil(thursday);
    (year, (thursday - day_number(year, 1, 1)) / 7 + 1)
}

/// Year, month, day of a day number since 1970-01-01 (Hinnant, "chrono-compatible low-level date
/// algorithms", `civil_from_days`).
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + u64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        // Against plain counting over four centuries, leap rules included.
        let (mut y, mut m, mut d) = (1970, 1, 1);
        for days in 0..150_000 {
            assert_eq!((civil(days), day_number(y, m, d)), ((y, m, d), days));
            let leap = y % 4 == 0 && (y % 100 != 0 || y % 400 == 0);
            let len =
                [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][m as usize - 1];
            (y, m, d) = if d < len {
                (y, m, d + 1)
            } else if m < 12 {
                (y, m + 1, 1)
            } else {
                (y + 1, 1, 1)
            };
        }
        let t = Some(1_721_952_000 + 13 * 3600 + 5 * 60); // Friday 2024-07-26 13:05 UTC
        assert_eq!(strftime("%d %b %Y", t).unwrap(), "26 Jul 2024");
        assert_eq!(strftime("%A %-m/%-d/%y %I:%M %p %%", t).unwrap(), "Friday 7/26/24 01:05 PM %");
        // As Python prints it.
        let all = "%j %T %Z %c %f %w %D %U %W %V %G %g %k %l %P %R %r %u %h %C %_d %-j %0e %s";
        let want = "208 13:05:00  Fri Jul 26 13:05:00 2024 000000 5 07/26/24 29 30 30 2024 24 13  1 pm 13:05 01:05:00 PM 5 Jul 20 26 208 26 1721999100";
        assert_eq!(strftime(all, t).unwrap(), want);
        for (seconds, want) in [
            (1_609_459_200, "2020 53 00 00"),
            (1_704_067_200, "2024 01 00 01"),
            (1_735_603_200, "2025 01 52 53"),
        ] {
            assert_eq!(strftime("%G %V %U %W", Some(seconds)).unwrap(), want);
        }
        assert!(strftime("%Q", t).is_err() && strftime("%", t).is_err());
        assert!(strftime("%Y", Some(u64::MAX)).is_ok());
    }
}
