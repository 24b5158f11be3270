"""What a rank sends, by the rules: requests, the grants that they meet, and the stages that they ask for."""
